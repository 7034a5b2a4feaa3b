//! Records that are uploaded to the tier, ordinary and damaged ones.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, Index};
use trimq_native_core::hash::Hash;
use trimq_native_core::heads::Place;
use trimq_native_core::tier::{can_restore, restore, upload, Queue, Upload};
use trimq_native_core::tier_index::put;

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
    let queue = Queue { topic: "TT", ids: (7, -3) };
    upload(log, start, units, position, &mut target, Some(queue)).map(|made| (made, target))
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
                expected.items.extend(Hash::of(&format!("TT#{key}")).in_tier().to_be_bytes());
                expected.items.extend([0, 0, 0, 7, 0xFF, 0xFF, 0xFF, 0xFD]);
                expected.items.extend(at.to_be_bytes());
                expected.items.extend((bytes.len() as u32).to_be_bytes());
                expected.items.extend([0; 8]);
                expected.times.extend(one.stored.to_ne_bytes());
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

    #[test]
    fn what_was_uploaded_is_restored(
        ones in ones(), position in 0..1i64 << 40, unknown in 0..1i64 << 52, foreign in any::<Index>(), byte in 8..16usize,
    ) {
        // IPv4 hosts and the first magic: others are left to Python.
        let ones: Vec<One> = ones.into_iter().map(|one| One { magic: 0xDAA3_20A7, flags: 0, ..one }).collect();
        let (log, units, total) = made(&ones, 5);
        let (mut log, mut at) = (log, 0);
        for (number, one) in ones.iter().enumerate() {
            at += one.gap;
            let size = record(one).len();
            log[at + 12..at + 16].copy_from_slice(&3u32.to_be_bytes());
            log[at + 20..at + 28].copy_from_slice(&(100 + number as u64).to_be_bytes());
            at += size;
        }
        let (mut made, stored) = call(&log, 5, &units, position, total).unwrap();
        let place = Place { queue_id: 3, magic: 0xDAA3_20A7, topic: b"\x02TT" };
        let foreign = foreign.index(ones.len());
        made.entries[foreign * 16 + byte] ^= 1;
        prop_assert!(can_restore(&stored, position, &made.units, &made.entries, 100, &place, unknown));
        let mut records = stored.clone();
        restore(&mut records, position, &made.units, &made.entries, unknown);
        let mut at = 0;
        for (number, unit) in units.chunks(20).enumerate() {
            let size = u32::from_be_bytes(unit[8..12].try_into().unwrap()) as usize;
            let found = i64::from_be_bytes(records[at + 28..at + 36].try_into().unwrap());
            let physical = i64::from_be_bytes(unit[..8].try_into().unwrap());
            prop_assert_eq!(found, if number == foreign { position + at as i64 + unknown } else { physical });
            records[at + 28..at + 36].copy_from_slice(&stored[at + 28..at + 36]);
            at += size;
        }
        prop_assert_eq!(&records, &stored);

        let refused = |start: i64, units: &[u8], entries: &[u8], offset: i64, stored: &[u8]| {
            !can_restore(stored, start, units, entries, offset, &place, unknown)
        };
        prop_assert!(refused(position + 1, &made.units, &made.entries, 100, &stored));
        prop_assert!(refused(position, &made.units[20..], &made.entries[16..], 101, &stored));
        prop_assert!(refused(position, &made.units, &made.entries[..made.entries.len() - 1], 100, &stored));
        prop_assert!(refused(position, &made.units, &made.entries, 99, &stored));
        prop_assert!(refused(position, &made.units, &made.entries, 100, &stored[..stored.len() - 1]));
        prop_assert!(refused(position, &made.units, &made.entries, 100, &[&stored[..], &[0]].concat()));
    }

    #[test]
    fn items_are_found_along_the_chains(
        slots in 1..6usize,
        parts in vec(vec((prop_oneof![0..20i32, Just(i32::MIN), Just(-7)], any::<i64>()), 0..6), 1..4),
        begin in 0..1i64 << 40,
    ) {
        let total: usize = parts.iter().map(Vec::len).sum();
        let mut file = vec![0; 28 + 8 * slots + 32 * (total + 1)];
        let item = |hash: i32| [&hash.to_be_bytes()[..], &[1; 28]].concat();
        let (mut count, mut used) = (0, 0);
        let mut all = Vec::new();
        for part in &parts {
            let hashes: Vec<i32> = part.iter().map(|(hash, _)| *hash).collect();
            let times: Vec<i64> = part.iter().map(|(_, time)| *time).collect();
            used += put(&mut file, slots, count as u32, &hashes.iter().flat_map(|hash| item(*hash)).collect::<Vec<u8>>(), begin, &times).unwrap();
            count += part.len();
            all.extend(part.clone());
        }
        let int = |at: usize| i32::from_be_bytes(file[at..at + 4].try_into().unwrap());
        let place = |number: usize| 28 + 8 * slots + 32 * number;
        let mut in_use = 0;
        for slot in 0..slots {
            let expected: Vec<i32> = (1..=count as i32).rev()
                .filter(|number| all[*number as usize - 1].0.unsigned_abs() as usize % slots == slot).collect();
            let (mut found, mut next) = (Vec::new(), int(28 + 8 * slot));
            while next > 0 && next <= count as i32 && found.len() <= count {
                found.push(next);
                next = int(place(next as usize) + 28);
            }
            prop_assert_eq!(&found, &expected);
            in_use += usize::from(!expected.is_empty());
        }
        prop_assert_eq!(used, in_use);
        for (at, (hash, time)) in all.iter().enumerate() {
            prop_assert_eq!(int(place(at + 1)), *hash);
            let seconds = (i128::from(*time) - i128::from(begin)) / 1000;
            prop_assert_eq!(i128::from(int(place(at + 1) + 24)), seconds.clamp(i32::MIN.into(), i32::MAX.into()));
        }
        prop_assert!(put(&mut file, slots, total as u32, &item(1), 0, &[0]).is_none());
        prop_assert!(put(&mut file, 0, 0, &item(1), 0, &[0]).is_none());
        prop_assert!(put(&mut file, slots, 0, &item(1), 0, &[]).is_none());
    }
}
