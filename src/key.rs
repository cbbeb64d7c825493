//! The key of an operation: its owner, its kind, and the client's value.

use std::fmt;

use sha2::{Digest, Sha256};

/// The maximum length of a part of a key, in bytes of UTF-8. Three parts of this size fit well into a PostgreSQL B-tree
/// entry, which holds 2704 bytes. The examples of the IETF draft (UUIDs of 36 bytes) are far shorter.
pub(crate) const MAX_PART_BYTES: usize = 255;

/// The name of one operation that must happen once.
///
/// - `scope`: the owner of the operation, such as a tenant, account or user. Take the scope **from the authenticated
///   identity**, and never from the request's body. A key in one scope never finds the response of another scope.
/// - `operation`: the kind of operation, from a fixed set of names: `POST /payments`, `order.created`.
/// - `value`: the client's value: an `Idempotency-Key`, an event's id, a nonce.
///
/// **The database is the name space of operations.** Services that share a database need different operations, such as
/// `billing order.created`. Otherwise one service replays the answer of another service, and does nothing.
///
/// Each part has 1 to 255 bytes of UTF-8, no control characters, and at least one visible character. Parts are compared
/// byte by byte, so case, accents and Unicode normal forms make a difference.
///
/// Keys are ordered by scope, operation and value. Claim several keys of one transaction in this order, because two
/// transactions with opposite orders may deadlock.
///
/// ```
/// # use pg_idempotency::Key;
/// let key = Key::new("user:42", "POST /payments", "5a1d93c2-8f6e-4a34-9f50-0f0b9f1c9a11")?;
/// assert_eq!(key.operation(), "POST /payments");
/// assert!(Key::new("", "POST /payments", "x").is_err());
/// # Ok::<(), pg_idempotency::InvalidKey>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    scope: String,
    operation: String,
    value: String,
}

impl Key {
    /// Checks the three parts, and makes a key from them. No SQL runs.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`] if a part is empty, is longer than 255 bytes, contains a control character, or contains only
    /// white space and invisible characters.
    pub fn new(
        scope: impl Into<String>,
        operation: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<Self, InvalidKey> {
        Self::of(checked, scope.into(), operation.into(), value.into())
    }

    /// Makes the key of an existing record, for the functions of [`operator`](crate::operator). A part of a recorded
    /// key does not need a visible character. A person who edited the table, or an unreleased build, may have written a
    /// part without a visible character, and an operator must be able to settle the record.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`] if a part is empty, is longer than 255 bytes, or contains a control character.
    pub fn recorded(
        scope: impl Into<String>,
        operation: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<Self, InvalidKey> {
        Self::of(checked_recorded, scope.into(), operation.into(), value.into())
    }

    /// Makes a key from parts that `check` accepts.
    pub(crate) fn of(check: Check, scope: String, operation: String, value: String) -> Result<Self, InvalidKey> {
        Ok(Self {
            scope: check(KeyPart::Scope, scope)?,
            operation: check(KeyPart::Operation, operation)?,
            value: check(KeyPart::Value, value)?,
        })
    }

    /// The owner of the operation.
    #[must_use]
    pub fn scope(&self) -> &str {
        &self.scope
    }

    /// The kind of operation.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.operation
    }

    /// The client's value. The value may be a secret, so keep it out of logs.
    #[must_use]
    pub fn value(&self) -> &str {
        &self.value
    }

    pub(crate) fn lock_id(&self) -> i64 {
        let mut hasher = Sha256::new();
        self.hash_into(&mut hasher);
        let digest = hasher.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        i64::from_be_bytes(first)
    }

    /// Returns a key for the next service. The returned key is the same in every attempt, and consists of 32
    /// hexadecimal digits of a SHA-256. The digest covers this [`Key`], the stored bytes of the fingerprint with its
    /// version, and the name of the step. The name of the step is empty for the operation itself.
    pub(crate) fn downstream(&self, fingerprint: &[u8], step: &str) -> String {
        let mut hasher = Sha256::new_with_prefix(b"downstream");
        self.hash_into(&mut hasher);
        // Every version of the fingerprint has the same length, so the name of the step begins at the same byte.
        hasher.update(fingerprint);
        hasher.update(step);
        hex::encode(&hasher.finalize()[..16])
    }

    /// Hashes each part with its length in front, so that `("ab", "c")` and `("a", "bc")` differ.
    fn hash_into(&self, hasher: &mut Sha256) {
        for part in [&self.scope, &self.operation, &self.value] {
            // A part has at most 255 bytes, so its length fits one byte.
            hasher.update([part.len() as u8]);
            hasher.update(part);
        }
    }
}

/// Prints only the operation. The scope is an identity, and the value gives access to the response, so both must stay
/// out of a log.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("operation", &self.operation).finish_non_exhaustive()
    }
}

/// One of the three parts of a [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyPart {
    /// The owner of the operation.
    Scope,
    /// The kind of operation.
    Operation,
    /// The client's value.
    Value,
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scope => "scope",
            Self::Operation => "operation",
            Self::Value => "value",
        })
    }
}

/// The reason why a [`Key`] was refused. The key is refused before any SQL runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// The part is empty.
    #[error("the key's {part} is empty; it takes 1 to {MAX_PART_BYTES} bytes")]
    Empty {
        /// The refused part.
        part: KeyPart,
    },
    /// The part is longer than 255 bytes.
    #[error("the key's {part} is {bytes} bytes long; at most {MAX_PART_BYTES} are allowed; hash longer values")]
    TooLong {
        /// The refused part.
        part: KeyPart,
        /// The length of the part.
        bytes: usize,
    },
    /// The part contains a control character: U+0000 to U+001F, or U+007F to U+009F.
    #[error(
        "the key's {part} contains the control character U+{:04X} at byte {at}; remove it or encode it",
        *.character as u32
    )]
    ControlCharacter {
        /// The refused part.
        part: KeyPart,
        /// The character.
        character: char,
        /// The offset of the character, in bytes.
        at: usize,
    },
    /// The part has only white space and invisible characters, such as U+200B. A program that has lost the value may
    /// send such a text, and all its operations would then have the same key.
    #[error("the key's {part} contains only white space or invisible characters; send a visible text, such as a UUID")]
    NothingVisible {
        /// The refused part.
        part: KeyPart,
    },
}

impl InvalidKey {
    /// The part that was refused. A refused scope is a mistake of the service, and a refused value is a mistake of its
    /// client.
    #[cfg(feature = "http")]
    pub(crate) fn part(&self) -> KeyPart {
        match *self {
            Self::Empty { part }
            | Self::TooLong { part, .. }
            | Self::ControlCharacter { part, .. }
            | Self::NothingVisible { part } => part,
        }
    }
}

pub(crate) type Check = fn(KeyPart, String) -> Result<String, InvalidKey>;

/// Checks a part of a new key.
pub(crate) fn checked(part: KeyPart, text: String) -> Result<String, InvalidKey> {
    let text = checked_recorded(part, text)?;
    if text.chars().all(is_invisible) { Err(InvalidKey::NothingVisible { part }) } else { Ok(text) }
}

/// Whether the character is white space, or a character that Unicode does not display (Default_Ignorable_Code_Point).
/// The SQL function `idempotency.ensure` has the same list, in UTF-8.
fn is_invisible(character: char) -> bool {
    character.is_whitespace()
        || matches!(
            character,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
                | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
        )
}

/// Checks a part of the key of an existing record.
pub(crate) fn checked_recorded(part: KeyPart, text: String) -> Result<String, InvalidKey> {
    if text.is_empty() {
        return Err(InvalidKey::Empty { part });
    }
    if text.len() > MAX_PART_BYTES {
        let bytes = text.len();
        return Err(InvalidKey::TooLong { part, bytes });
    }
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, character)) => Err(InvalidKey::ControlCharacter { part, character, at }),
        None => Ok(text),
    }
}
