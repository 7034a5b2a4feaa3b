//! The work that TriMQ's broker does for many messages at a time: frames in; records, queue units, index entries and
//! replies out.
//!
//! There is no Python here: functions take slices and return slices and numbers. The Python code is the reference: what
//! is served here has the same records, units, index entries and replies. The rest is left to it, without side effects.
#![forbid(unsafe_code)]

pub mod batch;
pub mod halves;
pub mod hash;
pub mod header;
pub mod heads;
pub mod index;
pub mod log;
pub mod reply;
pub mod round;
pub mod rows;
pub mod rules;
pub mod signers;
pub mod stamp;
pub mod tier;
pub mod tier_index;
