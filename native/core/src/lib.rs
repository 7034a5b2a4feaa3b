//! What TriMQ's broker does by the dozen. No Python in here: slices in, slices and numbers out.
#![forbid(unsafe_code)]
