//! Hashes of keys and tags: Java's `String.hashCode`, and the index's hash derived from it.

/// A `String.hashCode` that can be continued: that of "ab" is `Hash::of("a").then("b")`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash(u32);

impl Hash {
    /// The hash of the empty text.
    pub const EMPTY: Hash = Hash(0);

    /// The hash of `text`.
    pub fn of(text: &str) -> Hash {
        Hash::EMPTY.then(text)
    }

    /// The hash after appending `text`.
    pub fn then(self, text: &str) -> Hash {
        if text.is_ascii() {
            let step = |hash: u32, unit: &u8| hash.wrapping_mul(31).wrapping_add(u32::from(*unit));
            // four bytes at a time: with single bytes, each step would wait for the result of the one before
            let fours = text.as_bytes().chunks_exact(4);
            let rest = fours.remainder();
            let hash = fours.fold(self.0, |hash, four| {
                let own = four.iter().fold(0, step);
                hash.wrapping_mul(31 * 31 * 31 * 31).wrapping_add(own)
            });
            return Hash(rest.iter().fold(hash, step));
        }
        let step = |hash: u32, unit: u16| hash.wrapping_mul(31).wrapping_add(u32::from(unit));
        Hash(text.encode_utf16().fold(self.0, step))
    }

    /// Java's value, which is the code of a tag in a queue unit.
    pub fn value(self) -> i32 {
        self.0 as i32
    }

    /// The index's value: the absolute value, 0 if that overflows (`IndexFile.indexKeyHashMethod`).
    pub fn in_index(self) -> i32 {
        self.value().checked_abs().unwrap_or(0)
    }

    /// The value in the index of the tier: the absolute value, where the smallest number stays as it is (`IndexItem`).
    pub fn in_tier(self) -> i32 {
        self.value().wrapping_abs()
    }
}

/// Checksum of a body in a record: the lower 31 bits of its CRC-32; 0 for an empty body.
pub fn body_crc(body: &[u8]) -> u32 {
    crc32fast::hash(body) & 0x7FFF_FFFF
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_code_is_javas() {
        assert_eq!(Hash::of("").value(), 0);
        assert_eq!(Hash::of("TagA").value(), 2_598_919);
        assert_eq!(Hash::of("äöü").value(), 228 * 961 + 246 * 31 + 252);
        assert_eq!(Hash::of("a😀").value(), (97 * 31 + 0xD83D) * 31 + 0xDE00);
        assert_eq!(Hash::of("topic#").then("key"), Hash::of("topic#key"));
    }

    #[test]
    fn the_smallest_number_has_no_absolute_value() {
        assert_eq!(Hash(0x8000_0000).in_index(), 0);
        assert_eq!(Hash(0xFFFF_FFFF).in_index(), 1);
        assert_eq!(Hash(0x8000_0000).in_tier(), i32::MIN);
        assert_eq!(Hash(0xFFFF_FFFF).in_tier(), 1);
    }

    #[test]
    fn crc_keeps_31_bits() {
        assert_eq!(body_crc(b""), 0);
        assert_eq!(body_crc(b"123456789"), 0xCBF4_3926 & 0x7FFF_FFFF);
    }
}
