"""The layout that the other tests and the readers rely on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["kvdrive_sglang", "kv_tier", "kernels/kv_kernels", "services/kv_services"]
SHADOWS = ["kernels", "proto", "services"]


def python(code: str) -> str:
    """Run `code` in a fresh interpreter at the repository's root and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("folder", SHADOWS)
def test_folders_are_no_packages(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("name", ["kernels", "proto"])
def test_import_names_of_others_are_not_shadowed(name: str) -> None:
    # Hugging Face's `kernels` comes with SGLang; proto-plus's `proto` may or may not be there.
    found = python(f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s else None)")
    assert found == "None" or not Path(found).is_relative_to(ROOT) or "site-packages" in Path(found).parts
    assert name != "kernels" or "site-packages" in Path(found).parts


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_map(package: str) -> None:
    assert (ROOT / package / "README.md").is_file()


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_makefile_has_the_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "check", "proto", "bench", "clean"} <= targets


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("kv_services.client", "torch sglang triton transformers numpy redis"),
        ("kv_tier.meta.page_keys", "torch sglang triton transformers grpc"),
        ("kv_tier.meta.span_format", "torch sglang triton transformers grpc"),
        ("kvdrive_sglang", "torch sglang triton transformers"),
    ],
)
def test_imports_without(module: str, blocked: str) -> None:
    python(f"import sys; sys.modules.update(dict.fromkeys({blocked.split()})); import {module}")


def test_the_stubs_are_those_of_the_schema(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nproto:")[1].split("\n\n")[0]
    arguments = (
        recipe.split("grpc_tools.protoc")[1].replace("\\\n", " ").replace("=services", f"={tmp_path}").split()
    )
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=ROOT, check=True)
    fresh = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(fresh) == 3
    for path in fresh:
        committed = ROOT / "services" / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{path.name} is stale: run `make proto`"
