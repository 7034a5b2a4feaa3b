//! What is expected: records, hashes and checksums by their definitions.

/// A record, taken apart by its layout (see protocol/record.py).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub size: usize,
    pub magic: u32,
    pub body_crc: u32,
    pub queue_id: i32,
    pub flag: i32,
    pub queue_offset: i64,
    pub physical_offset: i64,
    pub sys_flag: i32,
    pub born_timestamp: i64,
    pub born_host: Vec<u8>,
    pub store_timestamp: i64,
    pub store_host: Vec<u8>,
    pub reconsume_times: i32,
    pub prepared_transaction_offset: i64,
    pub body: Vec<u8>,
    pub topic: Vec<u8>,
    pub properties: Vec<u8>,
}

impl Record {
    /// Its bytes, whatever its fields say.
    pub fn bytes(&self) -> Vec<u8> {
        [
            &(self.size as u32).to_be_bytes()[..],
            &self.magic.to_be_bytes(),
            &self.body_crc.to_be_bytes(),
            &self.queue_id.to_be_bytes(),
            &self.flag.to_be_bytes(),
            &self.queue_offset.to_be_bytes(),
            &self.physical_offset.to_be_bytes(),
            &self.sys_flag.to_be_bytes(),
            &self.born_timestamp.to_be_bytes(),
            &self.born_host,
            &self.store_timestamp.to_be_bytes(),
            &self.store_host,
            &self.reconsume_times.to_be_bytes(),
            &self.prepared_transaction_offset.to_be_bytes(),
            &(self.body.len() as u32).to_be_bytes(),
            &self.body,
            &[self.topic.len() as u8],
            &self.topic,
            &(self.properties.len() as u16).to_be_bytes(),
            &self.properties,
        ]
        .concat()
    }
}

/// Bytes that are read one after the other.
pub struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken.to_vec()
    }

    pub fn number(&mut self, size: usize) -> i64 {
        let bytes = self.take(size);
        let unsigned = bytes.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        let unused = 64 - 8 * size as u32;
        (unsigned << unused) as i64 >> unused
    }

    pub fn size(&mut self, size: usize) -> usize {
        usize::try_from(self.number(size)).expect("a length is not negative")
    }
}

/// The records that lie side by side in these bytes.
pub fn records(bytes: &[u8]) -> Vec<Record> {
    let mut reader = Reader(bytes);
    let mut found = Vec::new();
    while !reader.0.is_empty() {
        let left = reader.0.len();
        let size = reader.size(4);
        let magic = reader.number(4) as u32;
        let body_crc = reader.number(4) as u32;
        let (queue_id, flag) = (reader.number(4) as i32, reader.number(4) as i32);
        let (queue_offset, physical_offset) = (reader.number(8), reader.number(8));
        let sys_flag = reader.number(4) as i32;
        let born_timestamp = reader.number(8);
        let born_host = reader.take(if sys_flag & 0x10 != 0 { 20 } else { 8 });
        let store_timestamp = reader.number(8);
        let store_host = reader.take(if sys_flag & 0x20 != 0 { 20 } else { 8 });
        let reconsume_times = reader.number(4) as i32;
        let prepared_transaction_offset = reader.number(8);
        let body_length = reader.size(4);
        let body = reader.take(body_length);
        let topic_length = reader.number(1) as u8;
        let topic = reader.take(topic_length.into());
        let length = reader.size(2);
        let properties = reader.take(length);
        assert_eq!(left - reader.0.len(), size, "a record's parts end where its size says");
        found.push(Record {
            size,
            magic,
            body_crc,
            queue_id,
            flag,
            queue_offset,
            physical_offset,
            sys_flag,
            born_timestamp,
            born_host,
            store_timestamp,
            store_host,
            reconsume_times,
            prepared_transaction_offset,
            body,
            topic,
            properties,
        });
    }
    found
}

/// A unit of a consume queue: log offset, size, tags code.
pub type Unit = (i64, usize, i64);

/// The units in these bytes.
pub fn units(bytes: &[u8]) -> Vec<Unit> {
    let mut reader = Reader(bytes);
    let mut found = Vec::new();
    while !reader.0.is_empty() {
        found.push((reader.number(8), reader.size(4), reader.number(8)));
    }
    found
}

/// CRC-32 bit by bit, without the upper one.
pub fn crc(bytes: &[u8]) -> u32 {
    let mut value = u32::MAX;
    for byte in bytes {
        value ^= u32::from(*byte);
        for _ in 0..8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xEDB8_8320 } else { value >> 1 };
        }
    }
    !value & 0x7FFF_FFFF
}

/// String.hashCode: each unit of UTF-16 times a power of 31, from the end.
pub fn hash_code(text: &str) -> i32 {
    let units: Vec<u16> = text.encode_utf16().collect();
    let (mut sum, mut power) = (0u64, 1u64);
    for unit in units.iter().rev() {
        sum = (sum + u64::from(*unit) * power) & 0xFFFF_FFFF;
        power = (power * 31) & 0xFFFF_FFFF;
    }
    sum as u32 as i32
}

/// The index's hash of a topic and a key.
pub fn index_hash(topic: &str, key: &str) -> i32 {
    match hash_code(&format!("{topic}#{key}")) {
        i32::MIN => 0,
        value => value.abs(),
    }
}

/// The keys of a message in the index: UNIQ_KEY, the words of KEYS and, where that is on, the tag.
pub fn keys(unique: Option<&str>, words: Option<&str>, tag: Option<&str>, tags: bool) -> Vec<String> {
    let mut found: Vec<String> = unique.iter().map(ToString::to_string).collect();
    found.extend(words.unwrap_or("").split(' ').filter(|word| !word.is_empty()).map(ToOwned::to_owned));
    if tags {
        found.extend(tag.map(|tag| format!("T#{tag}")));
    }
    found
}
