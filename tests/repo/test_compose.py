"""The compose file against the public Compose Specification and against what it promises."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_compose_follows_the_specification(compose: dict[str, Any]) -> None:
    # check-jsonschema carries the Compose Specification's schema (Apache-2.0)
    carried = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(carried.read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []
    compose_with_a_fault = compose | {"services": {"redis": {"imagine": "redis"}}}
    assert not validator.is_valid(compose_with_a_fault)


def test_only_the_grpc_port_is_published(compose: dict[str, Any]) -> None:
    services = compose["services"]
    published = [port.rsplit(":", 1)[1] for service in services.values() for port in service.get("ports", [])]
    assert published == ["50051"]
    # the engine listens on loopback; the service reaches it because it shares the network namespace
    assert services["service"]["network_mode"] == "service:engine"
    assert "--host" not in services["engine"]["command"]
    assert compose["networks"]["private"] == {"internal": True}
    assert services["redis"]["networks"] == ["private"]


def test_what_must_survive_is_on_volumes(compose: dict[str, Any]) -> None:
    services = compose["services"]
    redis = services["redis"]["command"]
    assert redis[redis.index("--appendonly") + 1] == "yes"
    assert "redis-data:/data" in services["redis"]["volumes"]
    for name in ("engine", "service"):
        assert "kvdrive-data:/data" in services[name]["volumes"]
        command = services[name]["command"]
        assert command[command.index("--data-dir") + 1] == "/data"
    named = {volume.split(":")[0] for service in services.values() for volume in service["volumes"]}
    assert {name for name in named if not name.startswith(".")} == set(compose["volumes"])


def test_every_container_says_whether_it_is_well(compose: dict[str, Any]) -> None:
    assert all("healthcheck" in service for service in compose["services"].values())


def test_images_are_built_from_files_that_exist(compose: dict[str, Any]) -> None:
    builds = [service["build"] for service in compose["services"].values() if "build" in service]
    assert len(builds) == 2
    for build in builds:
        lines = (ROOT / build["dockerfile"]).read_text().splitlines()
        sources = [path for line in lines if line.startswith("COPY") for path in line.split()[1:-1]]
        assert all((ROOT / path).exists() for path in sources)
