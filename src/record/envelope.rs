//! The stored request of a leased HTTP layer: one byte for the version, two for the length of the head, the head as
//! JSON, and the body as it came. The other stored requests are JSON, which never begins with a byte below the tab. A
//! search of either resumer has to skip the requests of the other in SQL, because some of them would hide the rest; a
//! column for this would cost every claim.

use super::resume::StoredAs;

const VERSION: u8 = 1;
/// The version and the length of the head.
const PREFIX: usize = 3;

/// The request of an operation behind a leased HTTP layer, without its body.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShownRequest {
    /// The method.
    pub method: String,
    /// The path with its query.
    pub target: String,
    /// The headers that are stored, one character for each byte of a value.
    pub headers: Vec<(String, String)>,
}

impl ShownRequest {
    #[cfg(feature = "http")]
    pub(crate) fn new(method: String, target: String, headers: Vec<(String, String)>) -> Self {
        Self { method, target, headers }
    }

    /// `None` if the head has more than 65,535 bytes.
    #[cfg(feature = "http")]
    pub(crate) fn with_body(&self, body: &[u8]) -> Option<Vec<u8>> {
        let head = serde_json::to_vec(&(&self.method, &self.target, &self.headers)).ok()?;
        let length = u16::try_from(head.len()).ok()?.to_be_bytes();
        Some([&[VERSION], &length[..], &head, body].concat())
    }

    /// Separates the head from the body. `None` if this is no request of a layer, or one of a newer release.
    pub(crate) fn read(stored: &[u8]) -> Option<(Self, &[u8])> {
        let (&[VERSION, high, low], rest) = stored.split_first_chunk::<PREFIX>()? else { return None };
        let (head, body) = rest.split_at_checked(u16::from_be_bytes([high, low]).into())?;
        let (method, target, headers) = serde_json::from_slice(head).ok()?;
        Some((Self { method, target, headers }, body))
    }
}

impl StoredAs {
    /// The first and the last of the first bytes that such requests have.
    pub(super) fn first_bytes(self) -> [&'static [u8]; 2] {
        match self {
            Self::Json => [b"\t", b"\xff"],
            #[cfg(feature = "http")]
            Self::Envelope => [&[VERSION], &[VERSION]],
        }
    }
}
