//! The body of an HTTP request, as it came over the wire.

use sha2::{Digest as _, Sha256};

use super::canonical::CanonicalJson;
use super::invalid_body::InvalidBody;
use super::lexemes::Lexemes;

/// Two different decimals of up to this many digits are never the same `f64` (`f64::DIGITS`).
const DIGITS: usize = f64::DIGITS as usize;
/// Integers of up to this many digits fit a `u64` and, with a sign, an `i64`.
const INTEGER_DIGITS: usize = 18;
/// Exponents up to this size are well inside the range of an `f64`, which ends at 308 and, with fewer digits, at -308.
const EXPONENT: i32 = 250;

/// How a body is compared.
#[derive(Clone, Copy)]
pub(crate) enum Content<'b> {
    /// Byte by byte.
    Bytes(&'b [u8]),
    /// As canonical JSON. A body with a number that would lose digits on the way is compared byte by byte.
    Json(&'b [u8]),
}

impl Content<'_> {
    pub(super) fn hash_into(self, hasher: Sha256) -> Result<Sha256, InvalidBody> {
        match self {
            Self::Json(text) if keeps_its_digits(text) => {
                let mut json = CanonicalJson::of_parser();
                let mut parser = serde_json::Deserializer::from_slice(text);
                serde_transcode::transcode(&mut parser, &mut json)?;
                parser.end().map_err(InvalidBody::not_json)?;
                Ok(hasher.chain_update(b"j").chain_update(json.finish()?))
            }
            Self::Bytes(bytes) | Self::Json(bytes) => Ok(hasher.chain_update(b"b").chain_update(bytes)),
        }
    }
}

/// Whether every number of a JSON text remains different from every other number when it is parsed into a `u64`, `i64`
/// or `f64`. For a text that is not JSON the answer means nothing.
fn keeps_its_digits(text: &[u8]) -> bool {
    Lexemes::of(text).filter(|lexeme| lexeme[0].is_ascii_digit()).all(number_keeps_its_digits)
}

fn number_keeps_its_digits(number: &[u8]) -> bool {
    let mut parts = number.splitn(2, |byte| matches!(byte, b'e' | b'E'));
    let (mantissa, exponent) = (parts.next().unwrap_or_default(), parts.next());
    let digits = mantissa.iter().filter(|byte| byte.is_ascii_digit()).count();
    if exponent.is_none() && digits == mantissa.len() {
        return digits <= INTEGER_DIGITS;
    }
    let exponent = exponent.map_or(Some(0), |exponent| str::from_utf8(exponent).ok()?.parse::<i32>().ok());
    digits <= DIGITS && exponent.is_some_and(|exponent| (-EXPONENT..=EXPONENT).contains(&exponent))
}

#[cfg(test)]
#[path = "../../tests/unit/fingerprint/request.rs"]
mod tests;
