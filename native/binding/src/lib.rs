//! The Python module `trimq_native`.
use pyo3::prelude::*;

/// The native leaf of TriMQ's broker.
#[pymodule]
mod trimq_native {
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
