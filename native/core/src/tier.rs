//! Messages of a queue as they are uploaded to the tier. The reference is broker/store/tiered/access/batch.py.

use memchr::memmem;

use crate::hash::Hash;
use crate::heads::{are_messages, Place};
use crate::tier_index::add_item;

/// Bytes of a unit: log offset, size and tags code.
pub const UNIT: usize = 20;
/// Bytes of an entry of the side file: log offset, size and body CRC.
const ENTRY: usize = 16;
/// The fewest bytes of a record: without a body, a topic and properties, with IPv4 hosts.
const LEAST: usize = 91;
const MAGIC_V1: u32 = 0xDAA3_20A7;
const MAGIC_V2: u32 = 0xDAA3_20AB;
const AT_BODY_CRC: usize = 8;
const AT_POSITION: usize = 28;
const AT_SYS_FLAG: usize = 36;
const AT_BORN_HOST: usize = 48;
const BORN_HOST_V6: u32 = 0x10;
const STORE_HOST_V6: u32 = 0x20;

/// What belongs to the uploaded records, which are written to a buffer of the caller.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Upload {
    /// Units with positions in the tier.
    pub units: Vec<u8>,
    /// Entries of the side file.
    pub entries: Vec<u8>,
    /// The smallest store time (ms).
    pub begin: i64,
    /// The largest.
    pub end: i64,
    /// An item of the tier's index for each key, without seconds and link.
    pub items: Vec<u8>,
    /// The store time of each, in native byte order.
    pub times: Vec<u8>,
}

/// The queue that messages belong to, as the index knows it.
#[derive(Clone, Copy, Debug)]
pub struct Queue<'t> {
    /// Its topic.
    pub topic: &'t str,
    /// The number of the topic, and the queue's.
    pub ids: (i32, i32),
}

/// Copy the records that `units` refer to into `target`, one behind the other, with their positions in the tier.
///
/// `log` is the part of the log from log offset `start` on; `target` has exactly the records' size; the first stands at
/// `position` in the tier, or if that is negative, all keep the offsets that they have in the log. With a queue, items are made of the keys. None for anything unusual, such as a damaged record: then
/// what stands in `target` has no meaning.
pub fn upload(
    log: &[u8],
    start: i64,
    units: &[u8],
    position: i64,
    target: &mut [u8],
    queue: Option<Queue<'_>>,
) -> Option<Upload> {
    let count = units.len() / UNIT;
    let mut made = Upload { begin: i64::MAX, end: i64::MIN, ..Upload::default() };
    made.units.reserve_exact(count * UNIT);
    made.entries.reserve_exact(count * ENTRY);
    let queue = queue.map(|queue| (Hash::of(queue.topic).then("#"), queue.ids));
    let mut rest = target;
    let keeps = position < 0;
    let mut position = position;
    let mut units = units.chunks_exact(UNIT);
    for unit in units.by_ref() {
        let physical = i64::from_be_bytes(array(unit, 0)?);
        let size = u32::from_be_bytes(array(unit, 8)?) as usize;
        let at = usize::try_from(physical.checked_sub(start)?).ok()?;
        let record = log.get(at..at.checked_add(size)?)?;
        let (stored, properties) = parse(record)?;
        let (place, behind) = rest.split_at_mut_checked(size)?;
        place.copy_from_slice(record);
        if keeps {
            if record[AT_POSITION..AT_POSITION + 8] != physical.to_be_bytes() {
                return None;
            }
            position = physical;
        }
        place[AT_POSITION..AT_POSITION + 8].copy_from_slice(&position.to_be_bytes());
        rest = behind;
        made.units.extend_from_slice(&position.to_be_bytes());
        made.units.extend_from_slice(&unit[8..]);
        made.entries.extend_from_slice(&unit[..12]);
        made.entries.extend_from_slice(&record[AT_BODY_CRC..AT_BODY_CRC + 4]);
        made.begin = made.begin.min(stored);
        made.end = made.end.max(stored);
        if let Some((front, ids)) = queue {
            let text = std::str::from_utf8(properties).ok()?;
            let mut add = |key: &str| {
                add_item(&mut made.items, front.then(key).in_tier(), ids, position, size as i32);
                made.times.extend_from_slice(&stored.to_ne_bytes());
            };
            let unique = property(text, "\x02UNIQ_KEY\x01")?;
            if !unique.is_empty() {
                add(unique);
            }
            property(text, "\x02KEYS\x01")?.split(' ').filter(|word| !word.is_empty()).for_each(&mut add);
        }
        position = position.checked_add(size as i64)?;
    }
    (rest.is_empty() && units.remainder().is_empty() && count > 0).then_some(made)
}

/// Whether `stored` has the records of `units`, one behind the other, as they stand in the tier: ordinary ones only.
///
/// `stored` begins at stream position `start`, `offset` is the queue offset of the first; each has one of `entries`.
pub fn can_restore(
    stored: &[u8],
    start: i64,
    units: &[u8],
    entries: &[u8],
    offset: i64,
    place: &Place<'_>,
    unknown: i64,
) -> bool {
    let sizes = || units.chunks_exact(UNIT).map(|unit| u64::from(u32_at(unit, 8)));
    let length = stored.len() as u64;
    // They neither overlap (are_messages) nor leave bytes between them.
    sizes().sum::<u64>() == length
        && entries.len() / ENTRY == units.len() / UNIT
        && entries.len() % ENTRY == 0
        && start.checked_add(length as i64).and_then(|end| end.checked_add(unknown)).is_some()
        && are_messages(stored, start, units, offset, place)
}

/// Put the offsets that records have in the log, which `entries` hold, into `records`, for which `can_restore` is true.
///
/// A record whose entry belongs to another one gets its position plus `unknown`.
pub fn restore(records: &mut [u8], start: i64, units: &[u8], entries: &[u8], unknown: i64) {
    let mut at = 0;
    for (unit, entry) in units.chunks_exact(UNIT).zip(entries.chunks_exact(ENTRY)) {
        let record = &mut records[at..at + u32_at(unit, 8) as usize];
        let is_its =
            entry[0] < 0x80 && entry[8..12] == unit[8..12] && entry[12..] == record[AT_BODY_CRC..AT_BODY_CRC + 4];
        let place = &mut record[AT_POSITION..AT_POSITION + 8];
        if is_its {
            place.copy_from_slice(&entry[..8]);
        } else {
            place.copy_from_slice(&(start + at as i64 + unknown).to_be_bytes());
        }
        at += record.len();
    }
}

/// Store time and properties of a record whose lengths fill it exactly.
fn parse(record: &[u8]) -> Option<(i64, &[u8])> {
    if record.len() < LEAST || u32::from_be_bytes(array(record, 0)?) as usize != record.len() {
        return None;
    }
    let magic = u32::from_be_bytes(array(record, 4)?);
    let flags = u32::from_be_bytes(array(record, AT_SYS_FLAG)?);
    let host = |flag: u32| if flags & flag == 0 { 8 } else { 20 };
    let time_at = AT_BORN_HOST + host(BORN_HOST_V6);
    let stored = i64::from_be_bytes(array(record, time_at)?);
    // behind the store host: reconsume times 4, offset of the prepared message 8, body length 4
    let length_at = time_at + 8 + host(STORE_HOST_V6) + 12;
    let length = i32::from_be_bytes(array(record, length_at)?);
    let topic_at = (length_at + 4).checked_add(usize::try_from(length).ok()?)?;
    let topic_end = match magic {
        MAGIC_V1 => topic_at + 1 + usize::from(*record.get(topic_at)?),
        MAGIC_V2 => topic_at + 2 + usize::from(u16::from_be_bytes(array(record, topic_at)?)),
        _ => return None,
    };
    let properties = record.get(topic_end + 2..)?;
    let said = u16::from_be_bytes(array(record, topic_end)?);
    (usize::from(said) == properties.len()).then_some((stored, properties))
}

/// The last property of a name, "" if there is none; `mark` is the name between the separators that are around it.
/// None if its value is empty: then an earlier one counts.
pub(crate) fn property<'t>(text: &'t str, mark: &str) -> Option<&'t str> {
    let begin = match memmem::rfind(text.as_bytes(), mark.as_bytes()) {
        Some(at) => at + mark.len(),
        None if text.starts_with(&mark[1..]) => mark.len() - 1,
        None => return Some(""),
    };
    let value = &text[begin..];
    let value = value.split('\x02').next().unwrap_or(value);
    (!value.is_empty()).then_some(value)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(number)
}
