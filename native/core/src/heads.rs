//! Checks by their heads whether records of the log are the messages that a queue's units refer to. The reference is
//! broker/store/read/record_look.py; only ordinary records are supported here.

/// Bytes of a unit: log offset, size and tags code.
const UNIT: usize = 20;
/// Bytes of a record before its body, with IPv4 hosts.
const HEAD: usize = 88;
/// `BORN_HOST_V6 | STORE_HOST_V6`.
const V6: u32 = 0x30;

/// The fields that all records of a queue have in common.
pub struct Place<'a> {
    /// The queue's id.
    pub queue_id: i32,
    /// The magic of its records.
    pub magic: u32,
    /// Its topic as encoded in a record, after its length.
    pub topic: &'a [u8],
}

/// Whether each of `units` refers to the message with its queue offset; that of the first unit is `offset`.
///
/// `records` is the part of the log from log offset `start` on, all of it in memory. It must contain the units'
/// records, in their order and without overlaps. False also for anything unusual.
pub fn are_messages(records: &[u8], start: i64, units: &[u8], offset: i64, place: &Place<'_>) -> bool {
    let mut units = units.chunks_exact(UNIT);
    let mut before = 0;
    let all = units.by_ref().enumerate().all(|(number, unit)| {
        let physical = i64_at(unit, 0);
        let size = u32_at(unit, 8) as usize;
        let at = physical.checked_sub(start).and_then(|at| usize::try_from(at).ok());
        let Some(at) = at.filter(|at| *at >= before) else { return false };
        let Some(record) = at.checked_add(size).and_then(|end| records.get(at..end)) else { return false };
        before = at + size;
        offset.checked_add(number as i64).is_some_and(|offset| is_message(record, physical, offset, place))
    });
    all && units.remainder().is_empty()
}

fn is_message(record: &[u8], physical: i64, offset: i64, place: &Place<'_>) -> bool {
    if record.len() < HEAD {
        return false;
    }
    let is_usual = u32_at(record, 0) as usize == record.len()
        && u32_at(record, 4) == place.magic
        && u32_at(record, 12) as i32 == place.queue_id
        && i64_at(record, 20) == offset
        && i64_at(record, 28) == physical
        && u32_at(record, 36) & V6 == 0;
    let behind = HEAD.checked_add(u32_at(record, 84) as usize).and_then(|end| record.get(end..));
    let rest = behind.and_then(|rest| rest.strip_prefix(place.topic)).and_then(|rest| rest.split_at_checked(2));
    is_usual && rest.is_some_and(|(length, text)| usize::from(u16::from_be_bytes([length[0], length[1]])) == text.len())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(number)
}

fn i64_at(bytes: &[u8], at: usize) -> i64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    i64::from_be_bytes(number)
}
