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
    let Some((digits, decimals)) = short_decimal(value) else {
        return write_scientific(out, format_args!("{value:e}"));
    };
    let mut buffer = itoa::Buffer::new();
    out.extend_from_slice(buffer.format(digits).as_bytes());
    if decimals > 0 {
        out.extend_from_slice(b"e-");
        out.extend_from_slice(buffer.format(decimals).as_bytes());
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

/// Writes an `f32` in its own shortest digits, which are fewer than those of the same value as an `f64`.
pub(super) fn write_f32(out: &mut Vec<u8>, value: f32) {
    write_scientific(out, format_args!("{value:e}"));
}

fn write_scientific(out: &mut Vec<u8>, digits: std::fmt::Arguments<'_>) {
    // A sign, 17 digits, a point, `e`, a sign and 3 digits fit easily.
    let mut text = [0_u8; 40];
    let mut rest = &mut text[..];
    let written = rest.write_fmt(digits);
    debug_assert!(written.is_ok(), "a float has at most 24 characters");
    let length = 40 - rest.len();
    write_decimal(out, str::from_utf8(&text[..length]).unwrap_or_default());
}

/// Writes a decimal number of any length from its JSON text, by value: `1`, `1.0`, `10e-1` all become `1`.
///
/// The value is *digits × 10^exponent*, without leading or trailing zeros in the digits. An integer of at most
/// [`PLAIN_DIGITS`] is written as plain digits, any other value as `<digits>e<exponent>`. A text whose exponent does
/// not fit an `i64` is written unchanged; it equals no other number's form, because no other form has such an exponent.
pub(super) fn write_decimal(out: &mut Vec<u8>, text: &str) {
    let (sign, unsigned) = text.split_at(usize::from(text.starts_with('-')));
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));

    let start = out.len();
    out.extend_from_slice(sign.as_bytes());
    let first = out.len();
    out.extend(whole.bytes().chain(fraction.bytes()).skip_while(|digit| *digit == b'0'));
    let untrimmed = out.len();
    while out.len() > first && out.ends_with(b"0") {
        out.pop();
    }
    let (digits, trailing) = ((out.len() - first) as i64, (untrimmed - out.len()) as i64);
    if digits == 0 {
        // Zero has no sign: -0.0 and 0 are one value.
        out.truncate(start);
        out.push(b'0');
        return;
    }

    let exponent = exponent.parse::<i64>().ok();
    match exponent.and_then(|exponent| exponent.checked_sub(fraction.len() as i64)?.checked_add(trailing)) {
        Some(exponent @ 0..PLAIN_DIGITS) if digits + exponent <= PLAIN_DIGITS => {
            out.extend(std::iter::repeat_n(b'0', exponent as usize));
        }
        Some(exponent) => {
            out.push(b'e');
            out.extend_from_slice(itoa::Buffer::new().format(exponent).as_bytes());
        }
        None => {
            out.truncate(start);
            out.extend_from_slice(text.as_bytes());
        }
    }
}
