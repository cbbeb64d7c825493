//! The signature of a delivery: `X-Signature: t=<unix seconds>,v1=<hex>`, an HMAC-SHA256 of `<t>.<body>`, as Stripe
//! documents its own.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::digest::InvalidLength;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

pub(crate) const HEADER: &str = "X-Signature";

/// For how long a delivery that somebody has recorded can be played back, and how far apart the two clocks may be;
/// Stripe's libraries have five minutes. It can be this short because the sender signs every redelivery anew. Within
/// it, the mark stops a playback: it is a duplicate.
const TOLERANCE: Duration = Duration::from_secs(300);

/// What the two ends share. Keyed once, and cloned for each signature.
#[derive(Clone)]
pub(crate) struct Secret(Hmac<Sha256>);

/// Why a signature does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsigned {
    /// No signature in the header is of this time and body, by this secret.
    Forged,
    /// The signature is right, and from another time.
    Stale,
}

impl Secret {
    pub(crate) fn new(secret: &[u8]) -> Result<Self, InvalidLength> {
        Hmac::new_from_slice(secret).map(Self)
    }

    /// The header's value.
    pub(crate) fn sign(&self, body: &[u8], at: SystemTime) -> String {
        let time = unix_seconds(at).to_string();
        let tag = self.mac(&time, body).finalize().into_bytes();
        let hex: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("t={time},v1={hex}")
    }

    /// Takes the body as it came over the wire: parsed and encoded again it would be other bytes.
    pub(crate) fn verify(&self, header: &str, body: &[u8], now: SystemTime) -> Result<(), Unsigned> {
        let mut time = None;
        let mut tags = Vec::new();
        for part in header.split(',') {
            match part.split_once('=') {
                Some(("t", value)) => time = Some(value),
                // Several, while the sender goes from one secret to the next.
                Some(("v1", hex)) => tags.extend(bytes(hex)),
                // `v0`, or what a later scheme adds.
                _ => {}
            }
        }
        let time = time.ok_or(Unsigned::Forged)?;
        // In constant time and in full length: else a forger could guess the tag byte by byte.
        if !tags.iter().any(|tag| self.mac(time, body).verify_slice(tag).is_ok()) {
            return Err(Unsigned::Forged);
        }
        // Only now is the time the sender's own word.
        let time: u64 = time.parse().map_err(|_| Unsigned::Forged)?;
        if unix_seconds(now).abs_diff(time) > TOLERANCE.as_secs() {
            return Err(Unsigned::Stale);
        }
        Ok(())
    }

    fn mac(&self, time: &str, body: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(time).chain_update(".").chain_update(body)
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The bytes that these hexadecimal digits mean.
fn bytes(hex: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = hex.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
