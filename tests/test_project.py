"""What the scripts promise as files: equal copies of shared functions, declared packages, no dead setting."""

import ast
import importlib.metadata
import re
import sys
import tomllib

import pytest
from conftest import ROOT

SCRIPTS = sorted(ROOT.glob("ppo_*.py"))
TESTS = sorted((ROOT / "tests").glob("*.py"))

# Functions and classes of one name that may differ from script to script, with the reason.
MAY_DIFFER = {
    "Config": "defaults and flags of its own",
    "check_env": "environments of its own",
    "make_envs": "environments of its own",
    "finished_episodes": "environments of its own",
    "ActorCritic": "networks of its own",
    "update": "CartPole's network is too small for parts of minibatches; Atari shuffles within each environment",
    "evaluate": "environments of its own",
    "record_gif": "environments of its own",
    "Evaluation": "Flappy Bird has a score; Atari is evaluated greedily or not",
    # Atari's alone:
    "make_optimizer": "faster without optax.flatten, which the small networks of CartPole compile faster with",
    "rollout": "its environment says which rows are decisions",
    "compile_functions": "many devices",
    "learn": "many devices and processes",
    "train": "many devices and processes",
    "parse_args": "more flags that may change with --resume and --evaluate",
    "main": "many processes",
}


def requirements(lines):
    """{package: range} of lines like 'jax>=0.10,<0.13'."""
    lines = [line.split("#")[0].strip() for line in lines]
    found = [re.fullmatch(r"([A-Za-z0-9_.-]+)(\[.*\])?\s*(.*)", line).group(1, 3) for line in lines if line]
    return {name.lower().replace("_", "-"): limits.replace(" ", "") for name, limits in found}


def header(script):
    """The PEP 723 metadata of a script."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", script.read_text(), re.MULTILINE).group(1)
    return tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in block.splitlines(True)))


def definitions(script):
    """{name: source} of the functions and classes of a script."""
    source = script.read_text()
    nodes = (node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def imported(path):
    """The first parts of the names of all modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def packages_of(modules):
    """The packages that these modules come from, without the standard library."""
    known = importlib.metadata.packages_distributions()
    outside = modules - sys.stdlib_module_names - {script.stem for script in SCRIPTS} - {"conftest"}
    return {known[module][0].lower().replace("_", "-") for module in outside}


def declared(script):
    """The packages in the header of a script, and those that each of these asks for itself."""
    direct = set(requirements(header(script)["dependencies"]))
    found = set(direct)
    for name in direct:
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found |= {re.match(r"[A-Za-z0-9_.-]+", line).group().lower().replace("_", "-") for line in asked}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_header_and_requirements_name_the_same_packages(script):
    wanted = requirements((ROOT / "requirements.txt").read_text().splitlines())
    wanted.pop("pytest", None)
    assert requirements(header(script)["dependencies"]) == wanted


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_range_has_both_bounds(script):
    for name, limits in requirements(header(script)["dependencies"]).items():
        assert re.fullmatch(r">=[\d.]+,<[\d.]+", limits), name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_only_declared_packages_are_imported(script):
    assert packages_of(imported(script)) <= declared(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_setting_is_read(script):
    # A flag that nothing reads is a lie to its user.
    tree = ast.parse(script.read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    settings = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    # Those that a property of Config reads are read if the property is.
    derived = {
        node.name: {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        for node in config.body if isinstance(node, ast.FunctionDef)
    }  # fmt: skip
    outside = [node for node in tree.body if node is not config]
    read = {node.attr for part in outside for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    for _ in derived:
        read |= set().union(*(derived[name] for name in derived if name in read))
    assert settings <= read


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_setting_is_explained(script):
    lines = script.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    for node in config.body:
        if isinstance(node, ast.AnnAssign):
            above, line = lines[node.lineno - 2].strip(), lines[node.lineno - 1]
            assert "  # " in line or above.startswith("#"), node.target.id


def test_shared_functions_have_the_same_text_in_all_scripts():
    first = {}
    for script in SCRIPTS:
        for name, source in definitions(script).items():
            if name not in MAY_DIFFER:
                other, text = first.setdefault(name, (script, source))
                assert source == text, f"{name} differs between {other.name} and {script.name}"


def test_updates_on_pixels_use_ppo_gradient_and_flappy_birds_differs_from_cartpoles_in_nothing_else():
    cartpole, flappy, atari = (
        definitions(ROOT / f"ppo_{name}.py")["update"] for name in ("cartpole", "flappy", "atari")
    )
    assert flappy.count("ppo_gradient(") == atari.count("ppo_gradient(") == 1
    assert flappy.replace("ppo_gradient(", "jax.grad(ppo_loss, has_aux=True)(") == cartpole


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tests_need_nothing_more_than_the_scripts_and_pytest(path):
    assert packages_of(imported(path)) <= set().union({"pytest"}, *map(declared, SCRIPTS))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tests_use_no_network(path):
    allowed = {"socket"} if path.stem == "test_distributed" else set()  # it looks for a free port of this machine
    outside = {"socket", "urllib", "http", "ssl", "ftplib", "requests", "httpx", "aiohttp"}
    assert not imported(path) & (outside - allowed)
