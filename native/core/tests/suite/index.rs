//! Entries of an index file against a model of lists: each slot's chain has its entries, the newest first.

use proptest::collection::vec;
use proptest::prelude::*;
use trimq_native_core::index::{put, seconds_since, Entry};

use crate::config;

const HEADER: usize = 40;
const ENTRY: usize = 20;

fn int(bytes: &[u8], at: usize) -> i32 {
    i32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn set(bytes: &mut [u8], at: usize, value: i32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn entry_at(slots: usize, number: usize) -> usize {
    HEADER + 4 * slots + ENTRY * number
}

/// The numbers of a slot's entries, from its table on.
fn chain(file: &[u8], slots: usize, slot: usize) -> Vec<i32> {
    let mut found = Vec::new();
    let mut next = int(file, HEADER + 4 * slot);
    while next > 0 {
        found.push(next);
        assert!(found.len() <= file.len() / ENTRY, "a chain without an end");
        next = int(file, entry_at(slots, next as usize) + 16);
    }
    found
}

fn entry() -> impl Strategy<Value = Entry> {
    let hash = prop_oneof![4 => 0..40i32, 1 => 0..=i32::MAX];
    (hash, any::<i64>(), any::<i32>()).prop_map(|(hash, physical, seconds)| Entry { hash, physical, seconds })
}

/// A file of `slots` with counted entries, and then what a process that was killed has left behind.
#[derive(Debug)]
struct File {
    slots: usize,
    known: Vec<Entry>,
    /// Written behind the counted ones, and not counted.
    lost: Vec<Entry>,
    /// Invalid numbers in slots, which must not be used.
    stale: Vec<(usize, i32)>,
    spare: usize,
    new: Vec<Entry>,
}

fn file() -> impl Strategy<Value = File> {
    let stale = (any::<usize>(), prop_oneof![i32::MIN..0, 0..64i32, Just(i32::MAX)]);
    (1..24usize, vec(entry(), 0..24), vec(entry(), 0..24), vec(stale, 0..6), 0..50usize, vec(entry(), 0..24))
        .prop_map(|(slots, known, lost, stale, spare, new)| File { slots, known, lost, stale, spare, new })
}

/// The file's bytes, and for each slot the numbers of its counted entries, oldest first.
fn made(file: &File) -> (Vec<u8>, Vec<Vec<i32>>) {
    let slots = file.slots;
    let count = 1 + file.known.len();
    let mut bytes = vec![0xEE; entry_at(slots, count + file.lost.len().max(file.new.len())) + file.spare];
    bytes[HEADER..HEADER + 4 * slots].fill(0);
    let mut lists = vec![Vec::new(); slots];
    for (at, entry) in file.known.iter().chain(&file.lost).enumerate() {
        let number = at as i32 + 1;
        let slot = entry.hash as usize % slots;
        let place = entry_at(slots, at + 1);
        set(&mut bytes, place, entry.hash);
        let previous = int(&bytes, HEADER + 4 * slot);
        set(&mut bytes, place + 16, previous);
        set(&mut bytes, HEADER + 4 * slot, number);
        if at < file.known.len() {
            lists[slot].push(number);
        }
    }
    for (slot, number) in &file.stale {
        // one that would pass for a counted entry is not what a kill leaves behind
        let slot = slot % slots;
        if *number <= 0 || *number as usize >= count {
            set(&mut bytes, HEADER + 4 * slot, *number);
            lists[slot].clear(); // the chain of a slot that is not believed is lost, as in RocketMQ
        }
    }
    for (slot, list) in lists.iter_mut().enumerate() {
        let head = int(&bytes, HEADER + 4 * slot);
        if head <= 0 || head as usize >= count {
            list.clear();
        }
    }
    (bytes, lists)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn chains_have_their_entries_the_newest_first(file in file()) {
        let (before, mut lists) = made(&file);
        let slots = file.slots;
        let count = 1 + file.known.len();
        let mut bytes = before.clone();
        let used = put(&mut bytes, slots, count as u32, file.new.iter().copied());
        let mut touched = vec![false; slots];
        let mut empty = 0;
        for (at, entry) in file.new.iter().enumerate() {
            let slot = entry.hash as usize % slots;
            if lists[slot].is_empty() {
                empty += 1;
            }
            lists[slot].push((count + at) as i32);
            touched[slot] = true;
        }
        prop_assert_eq!(used, Some(empty));
        prop_assert_eq!(&bytes[..HEADER], &before[..HEADER]);
        for (slot, list) in lists.iter().enumerate() {
            let place = HEADER + 4 * slot;
            if touched[slot] {
                let newest: Vec<i32> = list.iter().rev().copied().collect();
                prop_assert_eq!(chain(&bytes, slots, slot), newest);
            } else {
                prop_assert_eq!(&bytes[place..place + 4], &before[place..place + 4]);
            }
        }
        let (begin, end) = (entry_at(slots, count), entry_at(slots, count + file.new.len()));
        prop_assert_eq!(&bytes[entry_at(slots, 0)..begin], &before[entry_at(slots, 0)..begin]);
        prop_assert_eq!(&bytes[end..], &before[end..]);
        for (at, entry) in file.new.iter().enumerate() {
            let place = entry_at(slots, count + at);
            prop_assert_eq!(int(&bytes, place), entry.hash);
            prop_assert_eq!(&bytes[place + 4..place + 12], entry.physical.to_be_bytes());
            prop_assert_eq!(int(&bytes, place + 12), entry.seconds);
        }
    }

    /// Entries that are written a second time, since the first time was not counted, are in their chains once.
    #[test]
    fn written_again_after_a_kill_it_is_the_same(file in file()) {
        let (before, _) = made(&file);
        let count = 1 + file.known.len() as u32;
        let mut once = before.clone();
        let used = put(&mut once, file.slots, count, file.new.iter().copied());
        let mut twice = once.clone();
        let again = put(&mut twice, file.slots, count, file.new.iter().copied());
        prop_assert!(used.is_some() && again.is_some());
        // the second call finds slots that the first one has filled, and believes none of them that is not counted
        for entry in &file.new {
            let slot = entry.hash as usize % file.slots;
            let new = |file_of: &[u8]| {
                let numbers = chain(file_of, file.slots, slot).into_iter();
                numbers.filter(|number| *number >= count as i32).collect::<Vec<_>>()
            };
            prop_assert_eq!(new(&once), new(&twice));
        }
    }

    /// Whatever the numbers are, it is refused or done, and what is refused changes nothing.
    #[test]
    fn any_numbers(
        bytes in vec(any::<u8>(), 0..400),
        slots in prop_oneof![0..40usize, Just(usize::MAX), Just(usize::MAX / 4), any::<usize>()],
        count in prop_oneof![0..12u32, Just(u32::MAX), Just(i32::MAX as u32), any::<u32>()],
        hashes in vec(any::<i32>(), 0..6),
    ) {
        let mut file = bytes.clone();
        let entries = hashes.iter().map(|hash| Entry { hash: *hash, physical: -1, seconds: -1 });
        let fits = slots > 0 && count > 0
            && slots < 100 && count < 100
            && entry_at(slots, count as usize + hashes.len()) <= bytes.len();
        let used = put(&mut file, slots, count, entries);
        prop_assert_eq!(used.is_some(), fits);
        if !fits {
            prop_assert_eq!(file, bytes);
        }
    }

    #[test]
    fn seconds_are_whole_and_never_negative(begin in any::<i64>(), time in any::<i64>()) {
        let seconds = i128::from(time) - i128::from(begin);
        let expected = if begin <= 0 { 0 } else { (seconds.max(0) / 1000).min(i128::from(i32::MAX)) };
        prop_assert_eq!(i128::from(seconds_since(begin, time)), expected);
    }
}
