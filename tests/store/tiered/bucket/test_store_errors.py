"""What obstore's errors become. Their texts are those of obstore 0.12 with versitygw, and of Azure's URLs."""

import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from trimq.broker.store.tiered.bucket.object_store import ChangedError
from trimq.broker.store.tiered.bucket.store_errors import as_os_error

_REFUSED = (
    "Error performing {} http://127.0.0.1:1/bucket/a in 1ms - Server returned non-2xx status code: 403 Forbidden: "
    '<?xml version="1.0"?>\n<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>KEY</AWSAccessKeyId></Error>'
)
_NO_BUCKET = (
    "Object at location a not found: Error performing GET http://127.0.0.1:1/nosuch/a in 1ms - Server returned non-2xx "
    "status code: 404 Not Found: <?xml?>\n<Error><Code>NoSuchBucket</Code></Error>"
)
_SIGNED = (
    "Generic MicrosoftAzure error: Error performing GET https://user:pw@x.blob.core.windows.net/c/a?sv=1&sig=SECRET in "
    "1ms - HTTP error: error sending request\n\nDebug source:\nsig=SECRET"
)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FileNotFoundError("Object at location a"), FileNotFoundError, "log/1 is not in the bucket"),
        (FileNotFoundError(_NO_BUCKET), OSError, "log/1 cannot be reached: the bucket does not exist"),
        (GenericError(_NO_BUCKET), OSError, "log/1 cannot be reached: the bucket does not exist"),
        (AlreadyExistsError("x"), FileExistsError, "log/1 is in the bucket already"),
        (PreconditionError("x"), ChangedError, "log/1 was changed meanwhile"),
        *(
            (
                error(_REFUSED.format("GET")),
                PermissionError,
                "the object store refuses access to log/1: HTTP status 403 SignatureDoesNotMatch",
            )
            for error in (PermissionDeniedError, GenericError)
        ),
        (UnauthenticatedError("No key"), PermissionError, "the object store refuses access to log/1: No key"),
        (
            GenericError("x - Server returned non-2xx status code: 503 Service Unavailable: "),
            OSError,
            "the object store has failed at log/1: HTTP status 503",
        ),
        (
            GenericError(_SIGNED),
            OSError,
            (
                "the object store has failed at log/1: Generic MicrosoftAzure error: Error performing "
                "GET https://***@x.blob.core.windows.net/c/a in 1ms - HTTP error: error sending request"
            ),
        ),
        (OSError(_REFUSED.format("PUT")), PermissionError, "the object store refuses access to log/1: HTTP status 403"),
    ],
)
def test_errors(error: Exception, kind: type[OSError], text: str) -> None:
    found = as_os_error(error, "log/1")
    assert type(found) is kind
    assert str(found).startswith(text)
    assert "KEY" not in str(found)
    assert "SECRET" not in str(found)


def test_a_long_text_is_cut() -> None:
    assert len(str(as_os_error(GenericError("x" * 5000), "a"))) < 300
