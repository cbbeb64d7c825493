//! A JSON text, piece by piece, as it is written.

/// The lexemes of a JSON text: strings with their quotation marks, numbers without their sign, and every other byte
/// that is not white space. The text is not checked: any bytes have lexemes.
pub(super) struct Lexemes<'t> {
    rest: &'t [u8],
}

impl<'t> Lexemes<'t> {
    pub(super) fn of(text: &'t [u8]) -> Self {
        Self { rest: text }
    }

    /// The first byte of the lexeme that comes next.
    pub(super) fn peek(&self) -> Option<u8> {
        self.rest.trim_ascii_start().first().copied()
    }

    /// The text of the value that comes next: all lexemes up to a comma, a colon or a closing bracket that is not its
    /// own.
    pub(super) fn next_value(&mut self) -> &'t [u8] {
        let text = self.rest.trim_ascii_start();
        let mut depth = 0_usize;
        while let Some(lexeme) = self.next() {
            match lexeme {
                b"{" | b"[" => depth += 1,
                b"}" | b"]" => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 && matches!(self.peek(), None | Some(b',' | b':' | b'}' | b']')) {
                break;
            }
        }
        &text[..text.len() - self.rest.len()]
    }
}

impl<'t> Iterator for Lexemes<'t> {
    type Item = &'t [u8];

    fn next(&mut self) -> Option<&'t [u8]> {
        self.rest = self.rest.trim_ascii_start();
        let length = match self.rest.first()? {
            b'"' => string_length(self.rest),
            b'0'..=b'9' => self.rest.iter().take_while(|byte| is_in_number(**byte)).count(),
            _ => 1,
        };
        let (lexeme, rest) = self.rest.split_at(length);
        self.rest = rest;
        Some(lexeme)
    }
}

/// The length of the string at the front of a text, to its closing quotation mark.
fn string_length(text: &[u8]) -> usize {
    // The opening quotation mark does not close the string either.
    let mut escaped = true;
    let end = text.iter().position(|byte| {
        let closes = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        closes
    });
    end.map_or(text.len(), |end| end + 1)
}

fn is_in_number(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')
}
