//! What TriMQ's broker does by the dozen: frames in; records, queue units, index entries and replies out.
//!
//! No Python in here: slices in, slices and numbers out. The reference for all of it is the Python way: what is served
//! here has the same records, units, index entries and replies, and what is not served here is left to it untouched.
#![forbid(unsafe_code)]

pub mod batch;
pub mod hash;
pub mod header;
pub mod heads;
pub mod index;
pub mod reply;
pub mod round;
pub mod rows;
pub mod rules;
