"""The wheel and the source distribution hold all that pdserve needs: it runs from them, outside of this tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

from pdserve.api.routes.description import render
from tests.processes import clean_environ, running
from tests.test_dependencies import declared, names_in, undeclared
from tests.test_packages import PACKAGES, ROOT

pytestmark = pytest.mark.integration

_BUILD = """
import sys
from setuptools import build_meta

out = sys.argv[1]
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""
QUESTION = "What is the capital of France? Answer in one sentence."
_GENERATED = {"__pycache__", ".mypy_cache", ".ruff_cache"}
DESCRIPTION = "pdserve/http/openapi.json"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a wheel and a source distribution, which were built from a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("pdserve", "proxy", "kvtransfer", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*_GENERATED, "*.egg-info"))
    command = [sys.executable, "-c", _BUILD, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def files_of_the_product() -> set[str]:
    """Returns every file that lies in a package of the product, by the path that it has when it is installed."""
    return {
        str(path.relative_to(folder))
        for package, folder in PACKAGES.items()
        for path in (folder / package).rglob("*")
        if path.is_file() and not _GENERATED & set(path.parts)
    }


def test_both_hold_every_file_of_the_product(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    wanted = files_of_the_product()
    assert any(name.endswith(".cpp") for name in wanted)
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
        folders = {name.partition("/")[0] for name in archive.namelist()}
        assert folders - set(PACKAGES) == {next(name for name in folders if name.endswith(".dist-info"))}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert wanted <= {name.removeprefix(f"{root}/") for root in ("proxy", "kvtransfer", "kernels") for name in held}


def test_both_have_the_description_of_the_http_interface(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(DESCRIPTION).decode() == render()
    with tarfile.open(sdist) as source:
        (member,) = [member for member in source.getmembers() if member.name.partition("/")[2] == DESCRIPTION]
        file = source.extractfile(member)
        assert file is not None and file.read().decode() == render()


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name))


def test_the_page_of_a_package_index_has_its_links_and_pictures(built: tuple[Path, Path]) -> None:
    metadata = metadata_of(built[0])
    urls = dict(str(line).split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    readme = (ROOT / "README.md").read_text()
    assert page.count("](") == readme.count("](") > 5
    targets = re.findall(r"""(?:\]\(|\b(?:src|href)=")([^)"\s]+)""", page)
    assert [target for target in targets if not re.match("https?://|#", target)] == []
    own = f"{urls['Source']}/", f"/v{metadata['Version']}/"
    pictures = [target for target in targets if target.startswith(own[0] + "raw" + own[1])]
    assert pictures
    for target in [*pictures, *(target for target in targets if target.startswith(own[0] + "blob" + own[1]))]:
        path = target.partition(own[1])[2].partition("#")[0]
        assert (ROOT / path).exists(), target


def test_the_wheel_requires_what_its_code_imports(built: tuple[Path, Path], tmp_path: Path) -> None:
    """What the development environment has beside it would hide a want when the wheel runs here."""
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path)
    required = metadata_of(built[0]).get_all("Requires-Dist", [])
    plain = [line for line in required if "extra ==" not in line]
    extra = [line for line in required if re.search(r'extra == "(bench|gpu|otel)"', line)]
    assert names_in(plain) == declared([])
    packages = [tmp_path / name for name in PACKAGES]
    assert undeclared(packages, names_in([*plain, *extra])) == set()
    assert undeclared(packages, names_in(plain) - {"quart"}) >= {"quart"}


@pytest.mark.usefixtures("demo_model")
def test_an_installed_wheel_answers_a_question(built: tuple[Path, Path], tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    (packages,) = environment.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    wheel = [*install, "--no-deps", "--no-index", "--disable-pip-version-check", str(built[0])]
    subprocess.run(wheel, check=True, timeout=120, stderr=subprocess.DEVNULL)
    # pdserve's dependencies are the ones that are installed here: a path in such a file brings no editable packages.
    import quart

    (packages / "dependencies.pth").write_text(f"{Path(quart.__file__).parents[1]}\n")
    program = str(environment / "bin" / "pdserve")
    nodes = ("--prefill", "0", "--decode", "0", "--mixed", "1")
    flags = (*nodes, "--port", "0", "--kv-cache-mib", "64", "--max-model-len", "512", "--ask", QUESTION)
    with running([program, "up", "--model", "demo", *flags], clean_environ(XDG_STATE_HOME=str(tmp_path))) as up:
        assert up.wait(180) == 0, up.output
    assert "Paris" in up.output
    where = [str(environment / "bin" / "python"), "-c", "import pdserve, pdserve_proxy; print(pdserve.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(environment)
