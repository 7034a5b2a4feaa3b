//! The crate from outside: what it makes of any bytes, and that what it writes is what was sent.
//!
//! What is expected is worked out here a second time, from the layouts and in the plainest way, with nothing of the crate.
//! `PROPTEST_CASES` says how many examples each test has (256), `PROPTEST_RNG_SEED` which ones.

mod batches;
mod frames;
mod heads;
mod hostile;
mod index;
mod leaving_out;
mod log;
mod model;
mod names;
mod round_trip;
mod signers;
mod tier;
mod time;
mod transactions;

use proptest::test_runner::Config;

/// So many examples as the environment says; a few where Miri interprets them.
fn config() -> Config {
    let usual = Config::default();
    if cfg!(miri) {
        // Miri has no files to keep failures in.
        Config { cases: 2, failure_persistence: None, ..usual }
    } else {
        usual
    }
}
