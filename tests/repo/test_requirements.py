"""The lock files: complete, hashed, and small where they must be small."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ["client", "service", "engine", "dev"]


def locked(name: str) -> dict[str, str]:
    """Return package -> version of requirements/<name>.txt, checking that each line pins and hashes."""
    pins: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.txt").read_text().strip()):
        requirement, *hashes = (part.strip(" \\") for part in entry.splitlines())
        parsed = Requirement(requirement)
        (pin,) = parsed.specifier
        assert pin.operator == "=="
        assert hashes
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
        pins[canonicalize_name(parsed.name)] = pin.version
    return pins


def asked(extra: str) -> list[Requirement]:
    """Return what pyproject.toml asks for with an extra, its own extras followed."""
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            wanted += [inner for name in requirement.extras for inner in asked(name)]
        else:
            wanted.append(requirement)
    return wanted


@pytest.mark.parametrize("extra", LOCKS)
def test_lock_satisfies_the_extra(extra: str) -> None:
    pins = locked(extra)
    for requirement in asked(extra):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True), (
            requirement
        )


@pytest.mark.parametrize("extra", ["client", "service", "engine"])
def test_locks_agree(extra: str) -> None:
    development = locked("dev")
    assert {
        name: version for name, version in locked(extra).items() if development.get(name, version) != version
    } == {}


def test_client_and_service_stay_light() -> None:
    heavy = {"torch", "triton", "sglang", "transformers"}
    assert not heavy & locked("service").keys()
    assert not (heavy | {"numpy", "redis"}) & locked("client").keys()


def test_uv_is_pinned() -> None:
    assert locked("uv").keys() == {"uv"}
