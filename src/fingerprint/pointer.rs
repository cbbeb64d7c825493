//! JSON pointers (RFC 6901).

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
    let valid = token.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    valid.then(|| token.replace("~1", "/").replace("~0", "~"))
}
