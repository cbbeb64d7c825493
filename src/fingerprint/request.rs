//! The body of an HTTP request, as it came over the wire.

use sha2::{Digest as _, Sha256};

use super::canonical::CanonicalJson;
use super::invalid_body::InvalidBody;

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
    pub(super) fn hash_into(self, mut hasher: Sha256) -> Result<Sha256, InvalidBody> {
        match self {
            Self::Json(text) if keeps_its_digits(text) => {
                hasher.update(b"j");
                let mut json = CanonicalJson::of_parser(hasher);
                let mut parser = serde_json::Deserializer::from_slice(text);
                serde_transcode::transcode(&mut parser, &mut json)?;
                parser.end().map_err(InvalidBody::not_json)?;
                json.finish()
            }
            Self::Bytes(bytes) | Self::Json(bytes) => {
                hasher.update(b"b");
                hasher.update(bytes);
                Ok(hasher)
            }
        }
    }
}

/// Whether every number of a JSON text remains different from every other number when it is parsed into a `u64`, `i64`
/// or `f64`. For a text that is not JSON the answer means nothing.
fn keeps_its_digits(text: &[u8]) -> bool {
    let mut bytes = text.iter().copied().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => skip_string(&mut bytes),
            b'0'..=b'9' => {
                let number = &text[at..];
                let length =
                    number.iter().take_while(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-'));
                let number = &number[..length.count()];
                if !number_keeps_its_digits(number) {
                    return false;
                }
                if number.len() > 1 {
                    bytes.nth(number.len() - 2);
                }
            }
            _ => {}
        }
    }
    true
}

fn skip_string(bytes: &mut impl Iterator<Item = (usize, u8)>) {
    while let Some((_, byte)) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b'"' => return,
            _ => {}
        }
    }
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
mod properties;

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(text: &str) -> Option<Vec<u8>> {
        Some(Content::Json(text.as_bytes()).hash_into(Sha256::new()).ok()?.finalize().to_vec())
    }

    #[test]
    fn white_space_order_and_spelling_of_numbers_do_not_count() {
        let one = hash(r#"{"amount": 12.50, "to": "ada"}"#);
        assert!(one.is_some());
        for same in [r#"{"to":"ada","amount":12.5}"#, r#" { "to" : "\u0061da" , "amount" : 125e-1 } "#] {
            assert_eq!(hash(same), one, "{same}");
        }
        for other in [r#"{"to":"ada","amount":"12.5"}"#, r#"{"to":"ada","amount":12.51}"#, r#"{"to":"ada"}"#] {
            assert_ne!(hash(other), one, "{other}");
        }
    }

    #[test]
    fn amounts_that_an_f64_cannot_tell_apart_are_two_requests() {
        for (one, other) in [
            ("9007199254740993.0", "9007199254740992.0"),
            ("0.1", "0.10000000000000000001"),
            ("18446744073709551616", "18446744073709551617"),
            ("-9223372036854775809", "-9223372036854775810"),
            ("1e400", "1e401"),
            ("[1e-400]", "[0]"),
            ("[4.9e-324]", "[5e-324]"),
        ] {
            assert!(hash(one).is_some(), "{one}");
            assert_ne!(hash(one), hash(other), "{one}");
        }
    }

    #[test]
    fn digits_in_strings_are_no_numbers() {
        assert!(keeps_its_digits(br#"{"a\"12345678901234567890": "12345678901234567890", "b": [1, -2.5e3]}"#));
        assert!(!keeps_its_digits(br#"["\\", 12345678901234567890]"#));
    }

    /// `script/test` runs this with serde_json's `arbitrary_precision` too, because another crate may turn it on. A
    /// fingerprint that was stored before must still be the same.
    #[test]
    fn the_digest_is_the_same_however_serde_json_was_built() {
        let canonical = br#"j{"$serde_json::private::Number":-3,"amount":125e-1,"n":[0,{"a":1}]}"#;
        let text = r#"{"n": [0, {"a": 1.0}], "amount": 12.50, "$serde_json::private::Number": -3}"#;
        assert_eq!(hash(text), Some(Sha256::digest(canonical).to_vec()));
    }

    #[test]
    fn a_text_that_is_not_json_is_refused() {
        for text in ["", "{", "{}{}", "[1,]", "nul", "{\"a\":1,\"a\":2}"] {
            assert_eq!(hash(text), None, "{text}");
        }
    }
}
