//! Records that are uploaded to the tier, ordinary and damaged ones.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, Index};
use trimq_native_core::hash::Hash;
use trimq_native_core::tier::{upload, Upload};

use crate::config;

const AT_POSITION: usize = 28;

#[derive(Clone, Debug)]
struct One {
    body: usize,
    properties: &'static str,
    keys: &'static [&'static str],
    magic: u32,
    flags: u32,
    stored: i64,
    gap: usize,
}

fn ones() -> impl Strategy<Value = Vec<One>> {
    let texts = select(vec![
        ("", &[][..]),
        ("UNIQ_KEY\x01u\x02", &["u"][..]),
        ("KEYS\x01a  b \x02UNIQ_KEY\x01u", &["u", "a", "b"][..]),
        ("TAGS\x01KEYS\x02XKEYS\x01no\x02", &[][..]),
        ("KEYS\x01old\x02KEYS\x01ключ\x02", &["ключ"][..]),
    ]);
    let magic = select(vec![0xDAA3_20A7, 0xDAA3_20AB]);
    let flags = select(vec![0, 0x10, 0x20, 0x30, 0x100]);
    let one = (0..40usize, texts, magic, flags, any::<i64>(), 0..9usize);
    let one = one.prop_map(|(body, (properties, keys), magic, flags, stored, gap)| One {
        body,
        properties,
        keys,
        magic,
        flags,
        stored,
        gap,
    });
    vec(one, 1..6)
}

fn record(one: &One) -> Vec<u8> {
    let mut bytes = vec![0; 36];
    bytes[4..8].copy_from_slice(&one.magic.to_be_bytes());
    bytes[8..12].copy_from_slice(&0x1234_5678u32.to_be_bytes());
    bytes.extend(one.flags.to_be_bytes());
    bytes.extend([1; 8]);
    bytes.extend(vec![2; if one.flags & 0x10 == 0 { 8 } else { 20 }]);
    bytes.extend(one.stored.to_be_bytes());
    bytes.extend(vec![3; if one.flags & 0x20 == 0 { 8 } else { 20 }]);
    bytes.extend([4; 12]);
    bytes.extend((one.body as u32).to_be_bytes());
    bytes.extend(vec![5; one.body]);
    bytes.extend(if one.magic == 0xDAA3_20A7 { vec![2] } else { vec![0, 2] });
    bytes.extend(b"TT");
    bytes.extend((one.properties.len() as u16).to_be_bytes());
    bytes.extend(one.properties.as_bytes());
    let size = bytes.len() as u32;
    bytes[..4].copy_from_slice(&size.to_be_bytes());
    bytes
}

/// The log from `start` on, the units, and the size of all records.
fn made(ones: &[One], start: i64) -> (Vec<u8>, Vec<u8>, usize) {
    let (mut log, mut units, mut total) = (Vec::new(), Vec::new(), 0);
    for one in ones {
        log.resize(log.len() + one.gap, 0xEE);
        let bytes = record(one);
        units.extend((start + log.len() as i64).to_be_bytes());
        units.extend((bytes.len() as u32).to_be_bytes());
        units.extend(9u64.to_be_bytes());
        total += bytes.len();
        log.extend(bytes);
    }
    (log, units, total)
}

fn call(log: &[u8], start: i64, units: &[u8], position: i64, total: usize) -> Option<(Upload, Vec<u8>)> {
    let mut target = vec![0xAA; total];
    upload(log, start, units, position, &mut target, Some("TT")).map(|made| (made, target))
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn records_are_those_of_the_log_at_their_new_positions(
        ones in ones(), start in 0..1i64 << 40, position in 0..1i64 << 40,
    ) {
        let (log, units, total) = made(&ones, start);
        let (found, target) = call(&log, start, &units, position, total).unwrap();
        let (mut at, mut expected) = (position, Upload { begin: i64::MAX, end: i64::MIN, ..Upload::default() });
        let mut records = Vec::new();
        for (one, unit) in ones.iter().zip(units.chunks(20)) {
            let mut bytes = record(one);
            bytes[AT_POSITION..AT_POSITION + 8].copy_from_slice(&at.to_be_bytes());
            expected.units.extend(at.to_be_bytes());
            expected.units.extend(&unit[8..]);
            expected.entries.extend(&unit[..12]);
            expected.entries.extend(0x1234_5678u32.to_be_bytes());
            expected.begin = expected.begin.min(one.stored);
            expected.end = expected.end.max(one.stored);
            for key in one.keys {
                expected.hashes.push(Hash::of(&format!("TT#{key}")).in_tier());
                expected.positions.push(at);
                expected.sizes.push(bytes.len() as i32);
                expected.times.push(one.stored);
            }
            at += bytes.len() as i64;
            records.extend(bytes);
        }
        prop_assert_eq!(target, records);
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn any_bytes_are_refused_or_copied(
        ones in ones(), harms in vec((any::<Index>(), any::<u8>()), 0..4), flips in vec((any::<Index>(), any::<u8>()), 0..2),
        more in -1..2isize,
    ) {
        let (mut log, mut units, total) = made(&ones, 5);
        for (at, mask) in harms {
            let at = at.index(log.len());
            log[at] ^= mask;
        }
        for (at, mask) in flips {
            let at = at.index(units.len());
            units[at] ^= mask;
        }
        let total = total.saturating_add_signed(more);
        if let Some((made, target)) = call(&log, 5, &units, 0, total) {
            prop_assert_eq!(made.units.len(), units.len());
            let sizes: usize = made.units.chunks(20).map(|unit| u32::from_be_bytes(unit[8..12].try_into().unwrap()) as usize).sum();
            prop_assert_eq!(sizes, target.len());
        }
    }
}
