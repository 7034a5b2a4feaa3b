//! Items of a local index file of the tier. The layout is in protocol/tiered_index_layout.py, the reference in
//! protocol/tiered_index_batch.py.
//!
//! The caller writes the header last, so that its count never covers an item that was not written.

const HEADER: usize = 28;
const SLOT: usize = 8;
/// Bytes of an item: hash, topic id, queue id, stream position, size, seconds and the previous item of its slot.
pub const ITEM: usize = 32;
const AT_SECONDS: usize = 24;
const AT_PREVIOUS: usize = 28;

/// Append an item whose seconds and link are not known yet, since they depend on the file.
pub fn add_item(items: &mut Vec<u8>, hash: i32, (topic, queue): (i32, i32), position: i64, size: i32) {
    items.extend_from_slice(&hash.to_be_bytes());
    items.extend_from_slice(&topic.to_be_bytes());
    items.extend_from_slice(&queue.to_be_bytes());
    items.extend_from_slice(&position.to_be_bytes());
    items.extend_from_slice(&size.to_be_bytes());
    items.extend_from_slice(&[0; ITEM - AT_SECONDS]);
}

/// Write items behind the `count` ones of a file with `slots` slots that began at `begin` (ms), and link them.
///
/// `times`: the store time of each in ms. Returns how many of their slots were empty before. None if the items do not
/// fit; then nothing was written.
pub fn put(file: &mut [u8], slots: usize, count: u32, items: &[u8], begin: i64, times: &[i64]) -> Option<usize> {
    let table_end = HEADER.checked_add(slots.checked_mul(SLOT)?)?;
    let first = table_end.checked_add(ITEM.checked_mul(count as usize + 1)?)?;
    let end = first.checked_add(items.len())?;
    let last = count.checked_add(u32::try_from(times.len()).ok()?)?;
    if slots == 0 || end > file.len() || items.len() != times.len() * ITEM || last > i32::MAX as u32 {
        return None;
    }
    let (front, rest) = file.split_at_mut(table_end);
    let table = &mut front[HEADER..];
    let space = &mut rest[first - table_end..end - table_end];
    let slot_of = |item: &[u8]| int_at(item, 0).unsigned_abs() as usize % slots;
    // All slots once before: they lie far from each other, and the processor reads many of them at the same time.
    std::hint::black_box(
        items.chunks_exact(ITEM).fold(0, |sum: i32, item| sum.wrapping_add(int_at(table, slot_of(item) * SLOT))),
    );
    let mut used = 0;
    for (at, (item, time)) in items.chunks_exact(ITEM).zip(times).enumerate() {
        let slot = slot_of(item);
        let head = &mut table[slot * SLOT..slot * SLOT + 4];
        let mut previous = int_at(head, 0);
        // An item that is not counted yet was written by this call, or by a process that was killed.
        let is_known = previous > 0
            && (previous <= count as i32 || {
                let before = (previous - count as i32) as usize - 1;
                before < at && slot_of(&space[before * ITEM..]) == slot
            });
        if !is_known {
            previous = 0;
            used += 1;
        }
        let place = &mut space[at * ITEM..(at + 1) * ITEM];
        place[..AT_SECONDS].copy_from_slice(&item[..AT_SECONDS]);
        place[AT_SECONDS..AT_PREVIOUS].copy_from_slice(&seconds_since(begin, *time).to_be_bytes());
        place[AT_PREVIOUS..].copy_from_slice(&previous.to_be_bytes());
        head.copy_from_slice(&(count + 1 + at as u32).to_be_bytes());
    }
    Some(used)
}

/// Whole seconds from the begin of a file to a time, rounded towards the begin.
fn seconds_since(begin: i64, time: i64) -> i32 {
    (time.saturating_sub(begin) / 1000).clamp(i32::MIN.into(), i32::MAX.into()) as i32
}

fn int_at(bytes: &[u8], at: usize) -> i32 {
    let mut int = [0; 4];
    int.copy_from_slice(&bytes[at..at + 4]);
    i32::from_be_bytes(int)
}
