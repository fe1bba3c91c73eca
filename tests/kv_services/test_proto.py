import subprocess
import sys
from importlib import resources
from pathlib import Path

from google.protobuf import descriptor_pool

from kv_services.v1 import session_pb2

ROOT = Path(__file__).parents[2]
STUBS = ("session_pb2.py", "session_pb2.pyi", "session_pb2_grpc.py")


def test_stubs_are_what_the_schema_generates(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-Ikv_services/v1={ROOT / 'proto/kvdrive/session/v1'}",
    ]
    command += [f"-I{resources.files('grpc_tools') / '_proto'}"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, "kv_services/v1/session.proto"], check=True, timeout=60)
    committed = ROOT / "services/kv_services/v1"
    for name in STUBS:
        assert (tmp_path / "kv_services/v1" / name).read_text() == (committed / name).read_text(), (
            f"{name}: make proto"
        )


def test_package_and_methods() -> None:
    service = session_pb2.DESCRIPTOR.services_by_name["SessionService"]
    assert service.full_name == "kvdrive.session.v1.SessionService"
    assert descriptor_pool.Default().FindServiceByName(service.full_name) is service
    names = [method.name for method in service.methods]
    assert names == [
        "CreateSession", "GetSession", "ListSessions", "UpdateSession", "DeleteSession", "ForkSession",
        "SuspendSession", "ResumeSession", "Generate", "CreateDocument",
    ]  # fmt: skip


def test_every_change_carries_a_request_id() -> None:
    service = session_pb2.DESCRIPTOR.services_by_name["SessionService"]
    for method in service.methods:
        reads = method.name in ("GetSession", "ListSessions")
        assert ("request_id" in method.input_type.fields_by_name) != reads, method.name
