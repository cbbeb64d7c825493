//! Signed requests: `X-Signature: t=<unix seconds>,v1=<hex>`, an HMAC-SHA256 of `<t>.<body>`, as Stripe documents its
//! own.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

pub const HEADER: &str = "x-signature";

/// For how long somebody can repeat a recorded request, and how far apart the two clocks may be. Stripe's libraries
/// allow five minutes. It can be this short because the sender signs every attempt anew. A repeat within this time is a
/// duplicate of its key.
const TOLERANCE: Duration = Duration::from_secs(300);

/// The secret that both ends share.
#[derive(Clone)]
pub struct Secret(Hmac<Sha256>);

impl Secret {
    pub fn new(secret: &[u8]) -> Self {
        Self(Hmac::new_from_slice(secret).expect("HMAC takes keys of any length"))
    }

    /// The header's value.
    pub fn sign(&self, body: &[u8], at: SystemTime) -> String {
        let time = unix_seconds(at).to_string();
        let tag = self.mac(&time, body).finalize().into_bytes();
        let hex: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("t={time},v1={hex}")
    }

    /// Whether the request's header is a signature of this body by this secret, and of this time. Takes the body as it
    /// arrived: parsed and encoded again, it would be other bytes.
    pub fn has_signed(&self, headers: &HeaderMap, body: &[u8], now: SystemTime) -> bool {
        let header = headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let member = |name: &str| header.split(',').find_map(|part| part.strip_prefix(name));
        let (Some(time), Some(tag)) = (member("t="), member("v1=").and_then(bytes)) else { return false };
        // In constant time and in full length: otherwise a forger could guess the tag byte by byte.
        self.mac(time, body).verify_slice(&tag).is_ok()
            && time.parse().is_ok_and(|time| unix_seconds(now).abs_diff(time) <= TOLERANCE.as_secs())
    }

    fn mac(&self, time: &str, body: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(time).chain_update(".").chain_update(body)
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The bytes that these hexadecimal digits stand for.
fn bytes(hex: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = hex.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
