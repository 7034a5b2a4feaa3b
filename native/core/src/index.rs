//! Entries of an index file: appended to the others, and linked into the chains of their slots.
//!
//! The caller writes the header last, so that its count never covers an entry that was not written.

const HEADER: usize = 40;
const SLOT: usize = 4;
const ENTRY: usize = 20;

/// An entry that is not written yet.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The index's hash of its key; never negative.
    pub hash: i32,
    /// Log offset of the message.
    pub physical: i64,
    /// Seconds since the begin time of the file.
    pub seconds: i32,
}

/// Write entries from number `count` on into the bytes of a file with `slots` slots.
///
/// Returns how many of their slots were empty before. None if the entries do not fit; then nothing was written.
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
    let space = &mut rest[begin - table_end..end - table_end];
    let slot_of = |hash: i32| hash.unsigned_abs() as usize % slots;
    let mut used = 0;
    for (at, entry) in entries.enumerate() {
        let slot = slot_of(entry.hash);
        let head = &mut table[slot * SLOT..(slot + 1) * SLOT];
        let mut previous = int_at(head, 0);
        // an entry that is not counted yet was written by this call, or by a process that was killed
        let is_known = previous > 0
            && (previous < count as i32 || {
                let before = (previous - count as i32) as usize;
                before < at && slot_of(int_at(space, before * ENTRY)) == slot
            });
        if !is_known {
            previous = 0;
            used += 1;
        }
        let place = &mut space[at * ENTRY..(at + 1) * ENTRY];
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

/// An entry's time difference: whole seconds since the file's begin time, at least 0; 0 without a begin time.
pub fn seconds_since(begin: i64, store_timestamp: i64) -> i32 {
    if begin <= 0 || store_timestamp <= begin {
        return 0;
    }
    i32::try_from((store_timestamp - begin) / 1000).unwrap_or(i32::MAX)
}
