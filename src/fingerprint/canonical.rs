//! Canonical JSON, written from JSON text in one pass.
//!
//! serde_json has already written or checked the text. The text is never parsed into a tree or into numbers. So every
//! digit counts, repeated members are noticed, and no feature of serde_json changes the outcome.

use std::iter::repeat_n;
use std::ops::Range;

/// serde_json parses values up to this depth. The limit bounds the stack.
const MAX_DEPTH: usize = 128;

/// Returns the canonical form of a JSON text, without the parts at the ends of the paths. A path contains the names and
/// the indices that lead to a part. A missing part is not an error.
///
/// Returns `None` if the text has no canonical form. The reason is an object with two members of the same name, a
/// string with half of a surrogate pair, or a depth of more than [`MAX_DEPTH`].
pub(super) fn canonical(text: &[u8], paths: &[&[String]]) -> Option<Vec<u8>> {
    let mut writer = Writer { text, at: 0, copied: 0, out: Vec::with_capacity(text.len()), members: Vec::new() };
    writer.value(paths, 0)?;
    writer.copy_to(writer.at);
    writer.peek().is_none().then_some(writer.out)
}

/// The writer copies the longest possible runs of the text. The run `copied..at` has been read, but not yet copied.
struct Writer<'t> {
    text: &'t [u8],
    at: usize,
    copied: usize,
    out: Vec<u8>,
    /// The members of all open objects. The members of the innermost object are the last. All objects share this
    /// buffer, so that no object allocates its own.
    members: Vec<Member>,
}

/// A member in the output: the range of its name, with the quotation marks, and the end of its value.
struct Member {
    name: Range<usize>,
    end: usize,
}

/// The inlined methods run for each member or element.
impl Writer<'_> {
    /// Copies the text up to `end`, and omits the text that was read after `end`.
    fn copy_to(&mut self, end: usize) {
        self.out.extend_from_slice(&self.text[self.copied..end]);
        self.copied = self.at;
    }

    /// The length of the output, including the run that is not yet copied.
    fn written(&self) -> usize {
        self.out.len() + self.at - self.copied
    }

    /// Returns the next byte that is not white space.
    #[inline]
    fn peek(&mut self) -> Option<u8> {
        let byte = *self.text.get(self.at)?;
        if !byte.is_ascii_whitespace() {
            return Some(byte);
        }
        let end = self.at;
        self.at += self.text[end..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.copy_to(end);
        self.text.get(self.at).copied()
    }

    #[inline]
    fn value(&mut self, paths: &[&[String]], depth: usize) -> Option<()> {
        match self.peek()? {
            b'{' | b'[' if depth == MAX_DEPTH => None,
            b'{' => self.object(paths, depth + 1),
            b'[' => self.parts(paths, depth + 1, false),
            b'"' => self.string(),
            _ => self.word(),
        }
    }

    fn object(&mut self, paths: &[&[String]], depth: usize) -> Option<()> {
        let outer = self.members.len();
        self.parts(paths, depth, true)?;
        self.copy_to(self.at);
        self.sort(outer)?;
        self.members.truncate(outer);
        Some(())
    }

    /// Reads the elements of an array or the members of an object, with the brackets.
    fn parts(&mut self, paths: &[&[String]], depth: usize, named: bool) -> Option<()> {
        self.at += 1;
        let opened = self.written();
        for index in 0_usize.. {
            let kept = self.written();
            match self.peek()? {
                b'}' | b']' => break,
                b',' => {
                    self.at += 1;
                    if kept == opened {
                        // All parts before this comma were left out, so the comma is left out, too.
                        self.copy_to(self.at - 1);
                    }
                    self.peek()?;
                }
                _ => {}
            }
            let name = if named { Some(self.name()?) } else { None };
            let token = || match &name {
                Some((range, _)) => serde_json::from_slice(&self.text[range.clone()]).ok(),
                None => Some(index.to_string()),
            };
            let keeps = if paths.is_empty() {
                self.value(paths, depth)?;
                true
            } else {
                let below = beyond(paths, &token()?);
                self.value(below.as_deref().unwrap_or_default(), depth)?;
                below.is_some()
            };
            match name {
                _ if !keeps => {
                    self.copy_to(self.at);
                    self.out.truncate(kept);
                }
                Some((_, name)) => self.members.push(Member { name, end: self.written() }),
                None => {}
            }
        }
        self.at += 1;
        Some(())
    }

    /// Reads the name of a member and the colon. Returns the range of the name in the text, and its range in the
    /// output.
    #[inline]
    fn name(&mut self) -> Option<(Range<usize>, Range<usize>)> {
        let (at, written) = (self.at, self.written());
        self.string()?;
        let name = (at..self.at, written..self.written());
        self.peek()?;
        self.at += 1;
        Some(name)
    }

    /// Reads a string, and writes it with the escapes of serde_json.
    #[inline]
    fn string(&mut self) -> Option<()> {
        let start = self.at;
        let rest = &self.text[start + 1..];
        let length = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
        if rest[length] == b'"' {
            self.at += length + 2;
            return Some(());
        }
        let mut escaped = false;
        let length = rest.iter().position(|byte| {
            let closes = *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && !escaped;
            closes
        })?;
        self.at += length + 2;
        let string: String = serde_json::from_slice(&self.text[start..self.at]).ok()?;
        self.copy_to(start);
        serde_json::to_writer(&mut self.out, &string).ok()
    }

    /// Reads a number, `true`, `false` or `null`.
    #[inline]
    fn word(&mut self) -> Option<()> {
        let (start, rest) = (self.at, &self.text[self.at..]);
        let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']' | 0..=b' ');
        let word = &rest[..rest.iter().position(ends).unwrap_or(rest.len())];
        self.at += word.len();
        if word.first()?.is_ascii_lowercase() {
            return Some(());
        }
        match canonical_length(word) {
            Some(length) if length == word.len() => {}
            Some(length) => self.copy_to(start + length),
            None => {
                self.copy_to(start);
                write_number(&mut self.out, str::from_utf8(word).ok()?);
            }
        }
        Some(())
    }

    /// Sorts the members of the object at the end of the output.
    fn sort(&mut self, outer: usize) -> Option<()> {
        let Self { out, members, .. } = self;
        let members = &mut members[outer..];
        // The comparison ignores the quotation marks, so that a name comes before all longer names that begin with it.
        let name = |member: &Member| &out[member.name.start + 1..member.name.end - 1];
        if members.is_sorted_by(|one, other| name(one) < name(other)) {
            return Some(());
        }
        let start = members.first()?.name.start;
        members.sort_unstable_by(|one, other| name(one).cmp(name(other)));
        if members.windows(2).any(|pair| name(&pair[0]) == name(&pair[1])) {
            return None;
        }
        // The sorted members replace the unsorted members, and have the same length.
        let unsorted = out.len();
        for member in members {
            out.push(b',');
            out.extend_from_within(member.name.start..member.end);
        }
        out.copy_within(unsorted + 1.., start);
        out.truncate(unsorted);
        Some(())
    }
}

/// Returns the rest of each path that leads through this name or index. `None` if a path ends there.
fn beyond<'p>(paths: &[&'p [String]], token: &str) -> Option<Vec<&'p [String]>> {
    let below = paths.iter().filter_map(|path| path.split_first()).filter(|(first, _)| *first == token);
    below.map(|(_, rest)| (!rest.is_empty()).then_some(rest)).collect()
}

/// The limit for numbers that are written without an exponent. A number within the limit has at most this many digits
/// in front of the decimal point, and at most this many zeros directly after the decimal point. No integer type has
/// more than 39 digits.
const PLAIN: i64 = 40;

/// Returns the length of the canonical form of a number that has at most [`PLAIN`] bytes and no exponent. `None` for
/// any other number, and for -0. The canonical form is a prefix of the number, such as `12.5` for `12.50`, and `1` for
/// `1.0`.
fn canonical_length(number: &[u8]) -> Option<usize> {
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
/// into an `i32` is written unchanged. The text of such a number never equals the canonical form of another value.
fn write_number(out: &mut Vec<u8>, text: &str) {
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
        // Zero is written without a sign, because -0.0 and 0 are the same value.
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

#[cfg(all(test, feature = "http"))]
#[path = "../../tests/unit/fingerprint/canonical.rs"]
mod tests;
