"""What the scripts promise as files: equal copies of shared functions, declared packages, no dead setting."""

import ast
import builtins
import difflib
import dis
import importlib.metadata
import re
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS

PATHS = sorted(ROOT.glob("ppo_*.py"))
TESTS = sorted((ROOT / "tests").glob("*.py"))
each_script = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)

# Functions and classes of one name that may differ from script to script, with the reason.
MAY_DIFFER = {
    "Config": "defaults and flags of its own",
    "make_envs": "environments of its own",
    "ActorCritic": "networks of its own",
    "update": "CartPole's network is too small for parts of minibatches; Atari shuffles within each environment",
    "evaluate": "environments of its own",
    "report": "Flappy Bird has a score; Atari is evaluated greedily or not",
    "learn": "Flappy Bird has a score; Atari has many devices",
    # Atari's alone:
    "make_optimizer": "faster without optax.flatten, which the small networks of CartPole compile faster with",
    "rollout": "its environment says which rows are decisions",
    "train": "many devices and processes",
    "evaluate_run": "many devices and processes",
    "parse_args": "more flags that may change with --resume and --evaluate",
    "main": "many processes",
}


def requirements(lines):
    """{package: range} of lines like 'jax>=0.10,<0.13'."""
    lines = [line.split("#")[0].strip() for line in lines]
    found = [re.fullmatch(r"([A-Za-z0-9_.-]+)(\[.*\])?\s*(.*)", line).group(1, 3) for line in lines if line]
    return {name.lower().replace("_", "-"): limits.replace(" ", "") for name, limits in found}


def header(path):
    """The ranges in the PEP 723 metadata of a script."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", path.read_text(), re.MULTILINE).group(1)
    return requirements(tomllib.loads(re.sub("^# ?", "", block, flags=re.MULTILINE))["dependencies"])


def definitions(path):
    """{name: source} of the functions and classes of a script."""
    source = path.read_text()
    nodes = (node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def config_of(path):
    """(the syntax tree of a script, that of its Config, the names of the settings)."""
    tree = ast.parse(path.read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    return tree, config, [node for node in config.body if isinstance(node, ast.AnnAssign)]


def imported(path):
    """The first parts of the names of all modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def packages_of(modules):
    """The packages that these modules come from, without the standard library."""
    known = importlib.metadata.packages_distributions()
    outside = modules - sys.stdlib_module_names - {path.stem for path in PATHS} - {"conftest"}
    return {known[module][0].lower().replace("_", "-") for module in outside}


def declared(path):
    """The packages in the header of a script, and those that each of these asks for itself."""
    found = set(header(path))
    for name in header(path):
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found |= {re.match(r"[A-Za-z0-9_.-]+", line).group().lower().replace("_", "-") for line in asked}
    return found


@each_script
def test_header_and_requirements_name_the_same_ranges_with_both_bounds(path):
    wanted = requirements((ROOT / "requirements.txt").read_text().splitlines())
    wanted.pop("pytest", None)
    assert header(path) == wanted
    for name, limits in wanted.items():
        assert re.fullmatch(r">=[\d.]+,<[\d.]+", limits), name


@each_script
def test_only_declared_packages_are_imported(path):
    assert packages_of(imported(path)) <= declared(path)


@each_script
def test_every_setting_is_read(path):
    # A flag that nothing reads is a lie to its user. Those that a property of Config reads are read if that is.
    tree, config, settings = config_of(path)
    derived = {
        node.targets[0].id: {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        for node in config.body if isinstance(node, ast.Assign)
    }  # fmt: skip
    outside = [node for node in tree.body if node is not config]
    read = {node.attr for part in outside for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    for node in outside:
        if "getattr(config, name)" in ast.unparse(node):
            read |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    for _ in derived:
        read |= set().union(*(derived[name] for name in derived if name in read))
    assert {node.target.id for node in settings} <= read


@each_script
def test_every_setting_is_explained(path):
    lines = path.read_text().splitlines()
    for node in config_of(path)[2]:
        assert "  # " in lines[node.lineno - 1] or lines[node.lineno - 2].strip().startswith("#"), node.target.id


@each_script
def test_no_line_is_longer_than_118_characters(path):
    assert not [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 118]


@each_script
def test_nothing_happens_at_import(path):
    statements = ast.parse(path.read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef)
    assert isinstance(statements[-1], ast.If)  # if __name__ == "__main__"
    others = [ast.unparse(statement) for statement in statements[1:-1] if not isinstance(statement, allowed)]
    assert all(text.startswith("os.environ.update(SDL_VIDEODRIVER=") for text in others)  # before pygame's import


def test_shared_functions_have_the_same_text_in_all_scripts():
    first = {}
    for path in PATHS:
        for name, source in definitions(path).items():
            if name not in MAY_DIFFER:
                other, text = first.setdefault(name, (path, source))
                assert source == text, f"{name} differs between {other.name} and {path.name}"


def globals_of(code):
    """The global names that a piece of compiled code and all in it read."""
    inner = (x for x in code.co_consts if hasattr(x, "co_consts"))
    found = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*map(globals_of, inner))


def test_shared_functions_mean_the_same_by_the_names_that_they_read():
    # With the test above: what holds for a shared function in one script holds in all.
    first = {}
    for path in PATHS:
        module, own = SCRIPTS[path.stem.removeprefix("ppo_")], definitions(path)
        for name, source in own.items():
            for read in globals_of(compile(source, path, "exec")) - {*own, "__name__", "__qualname__", "__file__"}:
                value = getattr(module, read) if hasattr(module, read) else getattr(builtins, read, None)
                known = value is not None or read in source.split("class ", 1)[-1]  # a field of the class itself
                may_differ = name in MAY_DIFFER or read == "PART_ROWS"  # found by measurement
                assert known and (may_differ or first.setdefault(read, value) == value), (name, read)


def changed(name, one, other):
    """(lines of a function that only `one` has, lines that only `other` has), of two scripts."""
    texts = (definitions(ROOT / f"ppo_{script}.py")[name].splitlines() for script in (one, other))
    lines = [line for line in difflib.ndiff(*texts) if not line.startswith("?")]
    return [[line[2:].strip() for line in lines if line[0] == sign] for sign in "-+"]


def test_flappy_birds_learn_differs_from_cartpoles_in_the_score_the_versions_and_pictures_that_are_always_finite():
    removed, added = changed("learn", "cartpole", "flappy")
    assert [line.split("(")[0].strip() for line in removed] == [
        "check_finite", "for name, queue in", 'result["versions"] = {module.__name__: module.__version__ for module in',
    ]  # fmt: skip
    assert added == [
        "queues = (envs.return_queue, envs.length_queue, envs.unwrapped.score_queue)",
        'for name, queue in zip(("return", "length", "score"), queues):',
        added[2],
        'result["versions"] = {name: importlib.metadata.version(name) for name in packages}',
    ]
    assert added[2].startswith("packages = (")


def test_configs_check_alike():
    kinds, texts = {}, {}
    for path in PATHS:
        _, config, settings = config_of(path)
        for node in settings:
            assert kinds.setdefault(node.target.id, ast.unparse(node.annotation)) == ast.unparse(node.annotation)
        texts[path.stem] = [ast.unparse(x) for x in config.body if isinstance(x, (ast.Assign, ast.FunctionDef))]
    assert texts["ppo_flappy"] == texts["ppo_cartpole"]
    *same, atari = texts["ppo_atari"]
    *others, cartpole = texts["ppo_cartpole"]
    lines = [line for line in difflib.ndiff(cartpole.splitlines(), atari.splitlines()) if line[0] in "-+"]
    own = ("--distributed", "num_steps % self", "--num-steps {self", "repeat_action", "addressed")
    assert same == others and all(line[0] == "-" or any(text in line for text in own) for line in lines)
    assert [line.split("=")[0].strip("- ") for line in lines if line[0] == "-"] == [
        "even", 'check(even, f\'--num-minibatches {self.num_minibatches} does not divide {rows}\')'
    ]  # fmt: skip


def test_updates_on_pixels_use_ppo_gradient_and_flappy_birds_differs_from_cartpoles_in_nothing_else():
    cartpole, flappy, atari = (
        definitions(ROOT / f"ppo_{name}.py")["update"] for name in ("cartpole", "flappy", "atari")
    )
    assert flappy.count("ppo_gradient(") == atari.count("ppo_gradient(") == 1
    assert flappy.replace("ppo_gradient(", "jax.grad(ppo_loss, has_aux=True)(") == cartpole


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tests_need_nothing_more_than_the_scripts_and_pytest(path):
    assert packages_of(imported(path)) <= set().union({"pytest"}, *map(declared, PATHS))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tests_use_no_network(path):
    allowed = {"socket"} if path.stem == "test_distributed" else set()  # it looks for a free port of this machine
    outside = {"socket", "urllib", "http", "ssl", "ftplib", "requests", "httpx", "aiohttp"}
    assert not imported(path) & (outside - allowed)
