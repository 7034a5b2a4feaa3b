//! The Python module `trimq_native`: thin wrappers around trimq-native-core. protocol/native.py has its Python types.
//!
//! All calls run their work in `guarded`. Only `tier_batch` releases the interpreter, in a thread of its own: the others
//! take well under a millisecond.

#![deny(unsafe_code)]
#![deny(clippy::undocumented_unsafe_blocks)]

#[allow(unsafe_code)] // slices of the interpreter's buffers
mod buffers;
mod entries;
mod heads;
mod log;
mod messages;
mod signers;
mod tier;

use std::panic::{catch_unwind, AssertUnwindSafe};

use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(trimq_native, NativeFault, PyRuntimeError, "A fault in the extension: the call has failed.");

/// Run the work of a call. A panic becomes a NativeFault, which `except Exception` catches, unlike PyO3's own.
fn guarded<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(fault(&text.unwrap_or_else(|| "a panic".to_owned())))
    })
}

/// The exception for a fault that a call detects in the extension.
fn fault(what: &str) -> PyErr {
    NativeFault::new_err(what.to_owned())
}

/// Panic, and report it as every other call would; for tests.
#[pyfunction]
fn panic() -> PyResult<()> {
    guarded(|| panic!("asked for"))
}

/// The native extension of TriMQ's broker.
#[pymodule]
mod trimq_native {
    use super::*;

    #[pymodule_export]
    use super::entries::{flat, put_entries, seconds, Keys};
    #[pymodule_export]
    use super::heads::are_messages;
    #[pymodule_export]
    use super::log::{log_check, log_rows};
    #[pymodule_export]
    use super::messages::{Messages, Reader};
    #[pymodule_export]
    use super::panic;
    #[pymodule_export]
    use super::signers::Signers;
    #[pymodule_export]
    use super::tier::{put_tier_items, tier_batch, tier_records};

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("NativeFault", module.py().get_type::<NativeFault>())
    }
}
