//! The texts of the pages, in which `{{name}}` stands for what is computed.

use anyhow::Context as _;

/// The text with its placeholders filled in.
pub(crate) fn filled(template: &str, mut value: impl FnMut(&str) -> anyhow::Result<String>) -> anyhow::Result<String> {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").context("a placeholder has no end")?;
        text += before;
        text += &value(name)?;
        rest = after;
    }
    Ok(text + rest)
}
