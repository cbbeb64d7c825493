//! Numbers in canonical form: one value has one text, in whatever type or spelling it comes.

use std::io::Write;

/// Integers of up to this many digits are written out. The largest `u128` has 39, so no integer type needs the exponent
/// form.
const PLAIN_DIGITS: i64 = 40;

/// The powers of ten that [`short_decimal`] tries. Amounts have up to four decimals, and each try costs a division.
const POWERS: [f64; 5] = [1.0, 1e1, 1e2, 1e3, 1e4];
/// Two different decimals of up to 15 digits are never the same `f64` (`f64::DIGITS`).
const TELLING: f64 = 1e15;

/// Writes an `f64` in its shortest round-trip digits, as `{:e}` has them. If two texts of that length are equally near,
/// as for 1125899906842624.25, std takes the upper one; serde_json (by ryu, or zmij) takes the even one, and so would
/// give another fingerprint.
pub(super) fn write_f64(out: &mut Vec<u8>, value: f64) {
    let Some((digits, decimals)) = short_decimal(value) else { return write_float(out, format_args!("{value:e}")) };
    write_integer(out, digits);
    if decimals > 0 {
        out.extend_from_slice(b"e-");
        write_integer(out, decimals);
    }
}

/// The short decimal from which a float was most likely made, as its digits and the number of its decimals.
///
/// Division rounds to the nearest `f64`, as a parser does. So if *digits / power* is `value`, a parser reads that
/// decimal as `value`; and it reads no other decimal of up to 15 digits as `value`, so none is as short.
fn short_decimal(value: f64) -> Option<(i64, usize)> {
    POWERS.iter().enumerate().find_map(|(decimals, power)| {
        let digits = (value * power).round();
        (digits.abs() < TELLING && digits / power == value).then_some((digits as i64, decimals))
    })
}

pub(super) fn write_integer(out: &mut Vec<u8>, value: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

/// Writes an `f64` or `f32` from its `{:e}`, which has the shortest round-trip digits of the type.
pub(super) fn write_float(out: &mut Vec<u8>, scientific: std::fmt::Arguments<'_>) {
    // A sign, 17 digits, a point, `e`, a sign and 3 digits fit easily.
    let mut text = [0_u8; 40];
    let mut rest = &mut text[..];
    let fits = rest.write_fmt(scientific).is_ok();
    debug_assert!(fits, "a float has at most 24 characters");
    let length = 40 - rest.len();
    write_decimal(out, std::str::from_utf8(&text[..length]).unwrap_or_default());
}

/// Writes a decimal number of any length from its JSON text, by value: `1`, `1.0`, `10e-1` all become `1`.
///
/// The value is *digits × 10^exponent*, without leading or trailing zeros in the digits. An integer of at most
/// [`PLAIN_DIGITS`] is written as plain digits, any other value as `<digits>e<exponent>`. A text whose exponent does
/// not fit an `i64` is written unchanged; it equals no other number's form, because no other form has such an exponent.
pub(super) fn write_decimal(out: &mut Vec<u8>, text: &str) {
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    // The digits are those of `whole`, then those of `fraction`. Zeros at either end are cut off.
    let (mut whole, mut digits) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    let mut trailing = fraction.len() - digits.len();
    if digits.is_empty() {
        let all = whole.len();
        whole = whole.trim_end_matches('0');
        trailing += all - whole.len();
    }
    if whole.is_empty() {
        digits = digits.trim_start_matches('0');
    }
    if whole.is_empty() && digits.is_empty() {
        // Zero has no sign: -0.0 and 0 are one value.
        out.push(b'0');
        return;
    }

    let exponent = exponent
        .parse::<i64>()
        .ok()
        .and_then(|exponent| exponent.checked_sub(fraction.len() as i64))
        .and_then(|exponent| exponent.checked_add(trailing as i64));
    let Some(exponent) = exponent else {
        out.extend_from_slice(text.as_bytes());
        return;
    };

    if negative {
        out.push(b'-');
    }
    out.extend_from_slice(whole.as_bytes());
    out.extend_from_slice(digits.as_bytes());
    let kept = (whole.len() + digits.len()) as i64;
    if (0..PLAIN_DIGITS).contains(&exponent) && kept + exponent <= PLAIN_DIGITS {
        out.extend(std::iter::repeat_n(b'0', exponent as usize));
    } else {
        out.push(b'e');
        write_integer(out, exponent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> String {
        let mut out = Vec::new();
        write_decimal(&mut out, text);
        String::from_utf8(out).expect("ASCII")
    }

    #[test]
    fn one_value_has_one_text() {
        for (text, expected) in [
            ("1", "1"),
            ("1.0", "1"),
            ("1e0", "1"),
            ("10e-1", "1"),
            ("0.1e+1", "1"),
            ("100", "100"),
            ("1E2", "100"),
            ("1.5", "15e-1"),
            ("-0.25", "-25e-2"),
            ("0", "0"),
            ("-0.0", "0"),
            ("0e999999999999999999999", "0"),
            ("1e39", "1000000000000000000000000000000000000000"),
            ("1e40", "1e40"),
            ("340282366920938463463374607431768211455", "340282366920938463463374607431768211455"),
            ("1e99999999999999999999", "1e99999999999999999999"),
        ] {
            assert_eq!(canonical(text), expected, "{text}");
        }
    }

    #[test]
    fn floats_are_written_in_their_shortest_digits() {
        let mut out = Vec::new();
        write_float(&mut out, format_args!("{:e}", 0.1_f64));
        out.push(b' ');
        write_float(&mut out, format_args!("{:e}", f64::MIN_POSITIVE));
        out.push(b' ');
        write_float(&mut out, format_args!("{:e}", 9_007_199_254_740_992_f64));
        assert_eq!(out, b"1e-1 22250738585072014e-324 9007199254740992");
    }
}
