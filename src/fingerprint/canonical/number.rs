//! Numbers in canonical form: one value has one text, in whatever way it is written.

use std::iter::repeat_n;

/// A number is written without an exponent if it has at most this many digits in front of the decimal point, and fewer
/// zeros than this behind it before the first other digit. No integer type has more than 39 digits.
const PLAIN: i64 = 40;

/// The length of the front of a number that is its canonical form, for a short number without an exponent: `12.50`
/// becomes `12.5`, and `1.0` becomes `1`.
pub(super) fn canonical_length(number: &[u8]) -> Option<usize> {
    let (mut point, mut exponent) = (false, false);
    for byte in number {
        point |= *byte == b'.';
        exponent |= matches!(byte, b'e' | b'E');
    }
    if exponent || number.len() > PLAIN as usize {
        return None;
    }
    let mut front = number;
    if point {
        while let [shorter @ .., b'0'] = front {
            front = shorter;
        }
        front = front.strip_suffix(b".").unwrap_or(front);
    }
    (front != b"-0").then_some(front.len())
}

/// Writes a number of any length by its value.
///
/// The value is *0.digits × 10^point*, without zeros at either end of the digits. A number whose exponent does not fit
/// an `i32` is written unchanged; no other number is written so, because the text is that of its value.
pub(super) fn write_number(out: &mut Vec<u8>, text: &str) {
    let (sign, unsigned) = text.split_at(usize::from(text.starts_with('-')));
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));

    let start = out.len();
    out.extend_from_slice(sign.as_bytes());
    let first = out.len();
    out.extend(whole.bytes().chain(fraction.bytes()).skip_while(|digit| *digit == b'0'));
    let zeros = whole.len() + fraction.len() - (out.len() - first);
    while out.len() > first && out.ends_with(b"0") {
        out.pop();
    }
    let digits = out.len() - first;
    if digits == 0 {
        // Zero has no sign: -0.0 and 0 are one value.
        out.truncate(start);
        out.push(b'0');
        return;
    }

    let Ok(exponent) = exponent.parse::<i32>() else {
        out.truncate(start);
        out.extend_from_slice(text.as_bytes());
        return;
    };
    let point = i64::from(exponent) + whole.len() as i64 - zeros as i64;
    match point {
        1..=PLAIN if point < digits as i64 => out.insert(first + point as usize, b'.'),
        1..=PLAIN => out.resize(first + point as usize, b'0'),
        _ if (-PLAIN..=0).contains(&point) => {
            out.splice(first..first, b"0.".iter().copied().chain(repeat_n(b'0', point.unsigned_abs() as usize)));
        }
        _ => out.extend_from_slice(format!("e{}", point - digits as i64).as_bytes()),
    }
}
