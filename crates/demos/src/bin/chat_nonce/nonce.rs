//! The nonce: a client's name for a message that has no id yet.

use serde::{Deserialize, Serialize};

/// Discord's limit: room for its ids (20 digits) and for 100 random bits in hexadecimal. At four bytes a character, it
/// stays far below the limit of a key.
const LONGEST: usize = 25;

/// A string of at most 25 characters, or an integer of 64 bits, which is the string of its digits: `1` and `"1"` are
/// **the same nonce**. Client libraries turn one into the other (an id that JavaScript cannot hold is sent as a string),
/// and a retry may come from another library than the first request. If the two were different, that retry would be a
/// second message.
///
/// Anything else is refused: a float and an integer beyond 64 bits have lost digits, perhaps those that tell two nonces
/// apart.
#[derive(Debug, Serialize, Deserialize)]
#[serde(try_from = "Sent")]
pub(crate) struct Nonce(String);

#[derive(Deserialize)]
#[serde(untagged, expecting = "a nonce is a string or an integer of 64 bits")]
enum Sent {
    Text(String),
    Unsigned(u64),
    Signed(i64),
}

impl TryFrom<Sent> for Nonce {
    type Error = String;

    fn try_from(sent: Sent) -> Result<Self, String> {
        let nonce = match sent {
            Sent::Text(text) => text,
            Sent::Unsigned(integer) => integer.to_string(),
            Sent::Signed(integer) => integer.to_string(),
        };
        // A key accepts no control characters.
        if (1..=LONGEST).contains(&nonce.chars().count()) && !nonce.contains(char::is_control) {
            return Ok(Self(nonce));
        }
        Err(format!("a nonce has 1 to {LONGEST} characters, none of them a control character"))
    }
}

impl Nonce {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}
