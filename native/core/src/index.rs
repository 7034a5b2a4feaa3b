//! Entries of an index file: written behind the others, and linked into the chains of their slots.
//!
//! The header is written last, by whoever has the file, so that its count never covers a hole.

const HEADER: usize = 40;
const SLOT: usize = 4;
const ENTRY: usize = 20;

/// An entry that has no place yet.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The index's hash of its key; never negative.
    pub hash: i32,
    /// Log offset of the message.
    pub physical: i64,
    /// Seconds since the begin of the file.
    pub seconds: i32,
}

/// Write entries number `count` and up into the bytes of a file with so many `slots`; how many slots were empty before.
///
/// None where they do not fit in there: nothing has been written then.
pub fn put(file: &mut [u8], slots: usize, count: u32, entries: impl ExactSizeIterator<Item = Entry>) -> Option<usize> {
    let table_end = HEADER.checked_add(slots.checked_mul(SLOT)?)?;
    let begin = table_end.checked_add(ENTRY.checked_mul(count as usize)?)?;
    let end = begin.checked_add(ENTRY.checked_mul(entries.len())?)?;
    if slots == 0
        || end > file.len()
        || count == 0
        || count.checked_add(entries.len().try_into().ok()?)? > i32::MAX as u32
    {
        return None;
    }
    let (front, rest) = file.split_at_mut(table_end);
    let table = &mut front[HEADER..];
    let room = &mut rest[begin - table_end..end - table_end];
    let slot_of = |hash: i32| hash.unsigned_abs() as usize % slots;
    let mut used = 0;
    for (at, entry) in entries.enumerate() {
        let slot = slot_of(entry.hash);
        let head = &mut table[slot * SLOT..(slot + 1) * SLOT];
        let mut previous = int_at(head, 0);
        // one that is not counted yet is this call's own, or was left behind by a process that was killed
        let is_known = previous > 0
            && (previous < count as i32 || {
                let before = (previous - count as i32) as usize;
                before < at && slot_of(int_at(room, before * ENTRY)) == slot
            });
        if !is_known {
            previous = 0;
            used += 1;
        }
        let place = &mut room[at * ENTRY..(at + 1) * ENTRY];
        place[..4].copy_from_slice(&entry.hash.to_be_bytes());
        place[4..12].copy_from_slice(&entry.physical.to_be_bytes());
        place[12..16].copy_from_slice(&entry.seconds.to_be_bytes());
        place[16..].copy_from_slice(&previous.to_be_bytes());
        head.copy_from_slice(&(count + at as u32).to_be_bytes());
    }
    Some(used)
}

fn int_at(bytes: &[u8], at: usize) -> i32 {
    let mut int = [0; 4];
    int.copy_from_slice(&bytes[at..at + 4]);
    i32::from_be_bytes(int)
}

/// Whole seconds since the begin time of a file, as an entry has them: 0 without one, never negative.
pub fn seconds_since(begin: i64, store_timestamp: i64) -> i32 {
    if begin <= 0 || store_timestamp <= begin {
        return 0;
    }
    i32::try_from((store_timestamp - begin) / 1000).unwrap_or(i32::MAX)
}
