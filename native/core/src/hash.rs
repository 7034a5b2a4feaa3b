//! Hashes of keys and tags: Java's `String.hashCode`, and what the index makes of it.

/// A `String.hashCode` that goes on: of "ab" it is `Hash::of("a").then("b")`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash(u32);

impl Hash {
    /// Of the empty text.
    pub const EMPTY: Hash = Hash(0);

    /// Of `text`.
    pub fn of(text: &str) -> Hash {
        Hash::EMPTY.then(text)
    }

    /// With `text` behind it.
    pub fn then(self, text: &str) -> Hash {
        if text.is_ascii() {
            let step = |hash: u32, unit: &u8| hash.wrapping_mul(31).wrapping_add(u32::from(*unit));
            // four at once: each step of one waits for the one before
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

    /// As Java has it: the code of a tag in a queue unit.
    pub fn value(self) -> i32 {
        self.0 as i32
    }

    /// As the index has it: the absolute value, 0 where that does not fit (`IndexFile.indexKeyHashMethod`).
    pub fn in_index(self) -> i32 {
        self.value().checked_abs().unwrap_or(0)
    }
}

/// Checksum of a body as records carry it: CRC-32, the lower 31 bits; 0 for no bytes.
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
    }

    #[test]
    fn crc_keeps_31_bits() {
        assert_eq!(body_crc(b""), 0);
        assert_eq!(body_crc(b"123456789"), 0xCBF4_3926 & 0x7FFF_FFFF);
    }
}
