//! Stamps of requests, which are served once: as protocol/auth/stamp.py.

const SENDER: usize = 16;
/// No stamp is longer: mark, code, time, sender, number, and what is between them.
const LONGEST: usize = 5 + 10 + 1 + 15 + 1 + SENDER + 1 + 18 + 1;

/// What the sender of a request has signed besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The code of the request that it was made for.
    pub code: u64,
    /// The sender's clock in ms.
    pub time: u64,
    /// The sender: random.
    pub sender: [u8; SENDER],
    /// The number of the request among those of its sender.
    pub number: u64,
}

impl Stamp {
    /// The stamp that begins `text` and goes on in `body`, after the mark of `mark` bytes.
    pub fn read(text: &[u8], body: &[u8], mark: usize) -> Option<Stamp> {
        let signed: Vec<u8> = text.iter().chain(body).copied().take(LONGEST).collect();
        let mut rest = signed.get(mark..)?;
        let code = number(&mut rest, 10, b':')?;
        let time = number(&mut rest, 15, b':')?;
        let sender: [u8; SENDER] = rest.get(..SENDER)?.try_into().ok()?;
        let is_valid = sender.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
        rest = rest.get(SENDER..)?.strip_prefix(b":").filter(|_| is_valid)?;
        let number = number(&mut rest, 18, b';')?;
        Some(Stamp { code, time, sender, number })
    }
}

/// Take a number of at most `most` digits, and what ends it.
fn number(rest: &mut &[u8], most: usize, end: u8) -> Option<u64> {
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits == 0 || digits > most || rest.get(digits) != Some(&end) {
        return None;
    }
    let value = rest[..digits].iter().fold(0, |value, digit| value * 10 + u64::from(digit - b'0'));
    *rest = &rest[digits + 1..];
    Some(value)
}
