//! The texts of the pages, in which `{{name}}` stands for what is computed.

use anyhow::Context as _;

const WIDTH: usize = 120;

/// The text with its placeholders filled in, and with its paragraphs in lines of 120 characters.
pub(crate) fn filled(template: &str, mut value: impl FnMut(&str) -> anyhow::Result<String>) -> anyhow::Result<String> {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").context("a placeholder has no end")?;
        text += before;
        text += &value(name)?;
        rest = after;
    }
    Ok(wrapped(&(text + rest)))
}

/// Tables, headings, images and lists keep their lines.
fn wrapped(text: &str) -> String {
    let paragraph = |paragraph: &str| {
        if paragraph.starts_with(['|', '#', '!', '-']) {
            return paragraph.to_owned();
        }
        let (mut wrapped, mut length) = (String::new(), 0);
        for word in paragraph.split_whitespace() {
            let more = word.chars().count();
            if length > 0 && length + more >= WIDTH {
                wrapped.push('\n');
                length = 0;
            } else if length > 0 {
                wrapped.push(' ');
                length += 1;
            }
            wrapped.push_str(word);
            length += more;
        }
        wrapped
    };
    text.split("\n\n").map(paragraph).collect::<Vec<_>>().join("\n\n").trim_end().to_owned() + "\n"
}
