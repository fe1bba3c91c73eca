import grpc
import pytest

from kv_services import errors
from kv_services.api import as_service_error
from kv_tier.meta.errors import CatalogUnavailable, DataDirError

CLASSES = sorted(errors.BY_REASON.values(), key=lambda cls: cls.reason)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_status_and_back(cls: type[errors.ServiceError]) -> None:
    error = cls("7 is above 5; use less", value=7, limit=5)
    status = errors.to_status(error)
    back = errors.from_status(status)
    assert type(back) is cls
    assert (back.code, back.reason, back.message) == (cls.code, cls.reason, error.message)
    assert back.metadata == {"value": "7", "limit": "5"}
    assert back.retry_after_s == cls.retry_after_s
    infos = [detail for detail in status.details if detail.type_url.endswith("google.rpc.ErrorInfo")]
    assert len(infos) == 1


def test_reasons_are_unique_and_unavailable_says_when_to_retry() -> None:
    assert len(CLASSES) == len(list(errors._tree(errors.ServiceError)))
    for cls in CLASSES:
        assert (cls.code is not grpc.StatusCode.UNAVAILABLE) or cls.retry_after_s


def test_unknown_reason_gives_the_class_of_its_code() -> None:
    status = errors.to_status(errors.SessionNotFound("x"))
    status.details.clear()
    assert type(errors.from_status(status)) is errors.SessionNotFound
    status.code = grpc.StatusCode.UNAVAILABLE.value[0]
    assert type(errors.from_status(status)) is errors.Unavailable


def test_errors_of_the_store_have_their_place() -> None:
    assert as_service_error(CatalogUnavailable("x")).reason == "CATALOG_UNAVAILABLE"
    assert as_service_error(DataDirError("x")).reason == "STORAGE_FAILED"
