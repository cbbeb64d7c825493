//! JSON pointers (RFC 6901), and a JSON text without the parts to which they point.
//!
//! The parts are cut out of the text. A parsed value would have lost digits of its numbers and repeated members, which
//! may be the difference between two requests.

use serde::de::IgnoredAny;

use super::invalid_body::InvalidBody;

/// A pointer to a member of an object, or to an element of an array; never to the whole text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pointer {
    tokens: Vec<String>,
}

impl Pointer {
    /// `None` if the text is no pointer, or points to the whole text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let tokens = text.strip_prefix('/')?.split('/').map(unescaped);
        Some(Self { tokens: tokens.collect::<Option<_>>()? })
    }

    pub(crate) fn tokens(&self) -> &[String] {
        &self.tokens
    }
}

fn unescaped(token: &str) -> Option<String> {
    let mut plain = String::new();
    let mut chars = token.chars();
    while let Some(char) = chars.next() {
        plain.push(match char {
            '~' => match chars.next()? {
                '0' => '~',
                '1' => '/',
                _ => return None,
            },
            char => char,
        });
    }
    Some(plain)
}

/// The text without the parts to which the pointers point. A part that is missing is no error. Elements are counted in
/// the original text, whatever else is cut out of it.
pub(crate) fn without<'p>(
    text: &[u8],
    pointers: impl IntoIterator<Item = &'p Pointer>,
) -> Result<Vec<u8>, InvalidBody> {
    // This checks the whole text, also the parts that are cut out. From here on brackets match, and strings and values
    // end.
    let IgnoredAny = serde_json::from_slice(text).map_err(InvalidBody::not_json)?;
    let paths: Vec<_> = pointers.into_iter().map(Pointer::tokens).collect();
    let mut cut = Cut { text, at: 0, kept: Vec::with_capacity(text.len()) };
    cut.value(&paths)?;
    Ok(cut.kept)
}

struct Cut<'t> {
    text: &'t [u8],
    at: usize,
    kept: Vec<u8>,
}

impl Cut<'_> {
    /// Keeps the value here, without the parts at the ends of the paths. It recurses along the paths only, so a deep
    /// text needs no deep stack.
    fn value(&mut self, paths: &[&[String]]) -> Result<(), InvalidBody> {
        match self.peek() {
            Some(b'{') if !paths.is_empty() => self.members(paths),
            Some(b'[') if !paths.is_empty() => self.elements(paths),
            _ => {
                let start = self.at;
                self.skip_value();
                self.kept.extend_from_slice(&self.text[start..self.at]);
                Ok(())
            }
        }
    }

    fn members(&mut self, paths: &[&[String]]) -> Result<(), InvalidBody> {
        self.open();
        let mut empty = true;
        while self.goes_on(b'}') {
            let start = self.at;
            self.skip_value();
            let written = &self.text[start..self.at];
            let name: String = serde_json::from_slice(written).map_err(InvalidBody::not_json)?;
            self.pass(b':');
            if let Some(paths) = beyond(paths, &name) {
                self.separate(&mut empty);
                self.kept.extend_from_slice(written);
                self.kept.push(b':');
                self.value(&paths)?;
            } else {
                self.skip_value();
            }
        }
        self.kept.push(b'}');
        Ok(())
    }

    fn elements(&mut self, paths: &[&[String]]) -> Result<(), InvalidBody> {
        self.open();
        let (mut empty, mut index) = (true, 0_usize);
        while self.goes_on(b']') {
            if let Some(paths) = beyond(paths, &index.to_string()) {
                self.separate(&mut empty);
                self.value(&paths)?;
            } else {
                self.skip_value();
            }
            index += 1;
        }
        self.kept.push(b']');
        Ok(())
    }

    fn open(&mut self) {
        let bracket = self.peek();
        self.kept.extend(bracket);
        self.at += 1;
    }

    fn separate(&mut self, empty: &mut bool) {
        if !std::mem::take(empty) {
            self.kept.push(b',');
        }
    }

    /// Whether another member or element follows. Skips the comma in front of it, or the bracket behind the last one.
    fn goes_on(&mut self, bracket: u8) -> bool {
        self.pass(b',');
        match self.peek() {
            None => false,
            Some(byte) if byte == bracket => {
                self.at += 1;
                false
            }
            Some(_) => true,
        }
    }

    fn pass(&mut self, mark: u8) {
        if self.peek() == Some(mark) {
            self.at += 1;
        }
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        while matches!(self.text.get(self.at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn skip_value(&mut self) {
        let mut depth = 0_usize;
        while let Some(byte) = self.peek() {
            match byte {
                b'"' => self.skip_string(),
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    self.at += 1;
                }
                b',' | b':' => self.at += 1,
                _ => self.skip_scalar(),
            }
            if depth == 0 {
                return;
            }
        }
    }

    fn skip_string(&mut self) {
        self.at += 1;
        while let Some(byte) = self.text.get(self.at) {
            self.at += 1;
            match byte {
                b'\\' => self.at += 1,
                b'"' => return,
                _ => {}
            }
        }
    }

    fn skip_scalar(&mut self) {
        while self.text.get(self.at).is_some_and(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(byte)) {
            self.at += 1;
        }
    }
}

/// The rest of the paths that lead through this name or index; `None` if one of them ends there.
fn beyond<'p>(paths: &[&'p [String]], token: &str) -> Option<Vec<&'p [String]>> {
    let below = paths.iter().filter_map(|path| path.split_first()).filter(|(first, _)| *first == token);
    below.map(|(_, rest)| (!rest.is_empty()).then_some(rest)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn cut(text: &str, pointers: &[&str]) -> Option<String> {
        let pointers: Vec<_> = pointers.iter().map(|pointer| Pointer::parse(pointer).expect("a pointer")).collect();
        Some(String::from_utf8(without(text.as_bytes(), &pointers).ok()?).expect("text"))
    }

    #[test]
    fn the_parts_are_cut_out_and_the_rest_is_unchanged() {
        for (text, pointers, left) in [
            (r#"{"a": 1, "b": [ 1 , 2 ], "c": "}" }"#, &["/a"][..], r#"{"b":[ 1 , 2 ],"c":"}"}"#),
            (r#"{"a":{"b":1,"c":2},"b":3}"#, &["/a/b"], r#"{"a":{"c":2},"b":3}"#),
            (r#"[0,[1,2],{"a":3}]"#, &["/0", "/1/1", "/2/a"], r#"[[1],{}]"#),
            (r#"{"a/b":1,"~":2,"":3,"\u0061":4,"é":5}"#, &["/a~1b", "/~0", "/", "/a", "/é"], "{}"),
            (r#"{"a":1,"a":2,"b":3,"b":4}"#, &["/a"], r#"{"b":3,"b":4}"#),
            (r#"{"a":9007199254740993.0,"b":1e400}"#, &["/c"], r#"{"a":9007199254740993.0,"b":1e400}"#),
            (r#"["a","b"]"#, &["/-", "/00", "/2", "/a"], r#"["a","b"]"#),
            (r#"{"a":"\\","b":"\"","c":[]}"#, &["/b", "/b/c"], r#"{"a":"\\","c":[]}"#),
            (" true ", &["/a"], "true"),
        ] {
            assert_eq!(cut(text, pointers).as_deref(), Some(left), "{text} without {pointers:?}");
        }
    }

    #[test]
    fn a_text_that_is_not_json_is_refused_even_if_the_fault_would_be_cut_out() {
        for text in ["", "{", "{}{}", r#"{"a":nul}"#, r#"{"a":1,}"#, r#"{"a":"\x"}"#, "[1 2]"] {
            assert_eq!(cut(text, &["/a"]), None, "{text}");
        }
    }

    #[test]
    fn what_is_very_deep_is_no_deeper_for_this() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(cut(&deep, &["/a"]).as_deref(), Some("{}"));
        assert_eq!(cut(&deep, &["/b"]).as_deref(), Some(&*deep));
    }

    /// The same by way of a tree.
    fn pruned(value: Value, paths: &[&[String]]) -> Value {
        match value {
            Value::Object(members) => members
                .into_iter()
                .filter_map(|(name, value)| Some((name.clone(), pruned(value, &beyond(paths, &name)?))))
                .collect(),
            Value::Array(elements) => elements
                .into_iter()
                .enumerate()
                .filter_map(|(index, value)| Some(pruned(value, &beyond(paths, &index.to_string())?)))
                .collect(),
            scalar => scalar,
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[\\[\\]{}\",:\\\\/~a0]{0,4}".prop_map(Value::from),
        ];
        scalar.prop_recursive(4, 40, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-c0\"/~]{0,2}", inner, 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn cutting_the_text_is_pruning_the_tree(
            json in any_json(),
            pointers in prop::collection::vec(prop::collection::vec("[a-c0-2\"/~]{0,2}", 1..4), 0..4),
            pretty in any::<bool>(),
        ) {
            let text = if pretty { serde_json::to_string_pretty(&json) } else { serde_json::to_string(&json) };
            let pointers: Vec<_> = pointers.into_iter().map(|tokens| Pointer { tokens }).collect();
            let left = without(text.expect("text").as_bytes(), &pointers).expect("JSON");
            let left: Value = serde_json::from_slice(&left).expect("still JSON");
            let paths: Vec<_> = pointers.iter().map(Pointer::tokens).collect();
            prop_assert_eq!(left, pruned(json, &paths));
        }
    }
}
