//! Objects: maps, structs, and the structs of enum variants.

use serde::ser::{self, Serialize};

use super::members::Opened;
use super::text::Text;
use super::writer::CanonicalJson;
use crate::fingerprint::invalid_body::InvalidBody;

/// serde_json's private name for a number that it keeps as text (its feature `arbitrary_precision`).
pub(super) const NUMBER_AS_TEXT: &str = "$serde_json::private::Number";

/// An open object. Its members gather in the buffer, in the order in which they come, until it closes.
pub(in crate::fingerprint) struct Object<'a> {
    json: &'a mut CanonicalJson,
    opened: Opened,
}

impl<'a> Object<'a> {
    pub(super) fn open(json: &'a mut CanonicalJson) -> Self {
        let opened = json.objects.open(json.out.len());
        json.out.push(b'{');
        Self { json, opened }
    }

    fn name(&mut self, name: &str) {
        let CanonicalJson { objects, out, .. } = &mut *self.json;
        if objects.has_members(self.opened) {
            out.push(b',');
        }
        objects.begin_member(name, out.len());
        self.json.write_string(name);
        self.json.write(b":");
    }

    fn value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        self.json.write_part(value)?;
        self.json.objects.end_member(self.json.out.len());
        Ok(())
    }

    /// Closes the object with `}`, or with `}}` if it is wrapped in `{"Variant":…}`.
    fn close(self, braces: &[u8]) -> Result<(), InvalidBody> {
        let CanonicalJson { objects, out, .. } = &mut *self.json;
        objects.sort(self.opened, out)?;
        objects.close(self.opened);
        self.json.write(braces);
        Ok(())
    }

    /// The text of the number, if this map is one. The text has no escapes, so the buffer holds it in quotes.
    fn number_as_text(&self) -> Option<String> {
        let (name, written) = self.json.objects.only_member(self.opened, &self.json.out)?;
        if !self.json.numbers_as_maps || name != NUMBER_AS_TEXT.as_bytes() {
            return None;
        }
        let written = str::from_utf8(written).ok()?;
        let text = written.strip_prefix('"')?.strip_prefix(NUMBER_AS_TEXT)?.strip_prefix("\":\"")?.strip_suffix('"')?;
        Some(text.to_owned())
    }
}

impl ser::SerializeMap for Object<'_> {
    type Ok = ();
    type Error = InvalidBody;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), InvalidBody> {
        let name = Text { take: |name: &str| self.name(name), refused: InvalidBody::KeyIsNoString };
        key.serialize(name).inspect_err(|error| self.json.failed = Some(error.clone()))
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        self.value(value)
    }

    fn end(self) -> Result<(), InvalidBody> {
        let Some(number) = self.number_as_text() else { return self.close(b"}") };
        self.json.out.truncate(self.opened.at);
        self.json.objects.close(self.opened);
        self.json.write_number(&number);
        Ok(())
    }
}

/// A struct or a struct variant: an object, or a number that serde_json keeps as text.
pub(in crate::fingerprint) enum Struct<'a> {
    Object { object: Object<'a>, in_variant: bool },
    NumberAsText(&'a mut CanonicalJson),
}

impl ser::SerializeStruct for Struct<'_> {
    type Ok = ();
    type Error = InvalidBody;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), InvalidBody> {
        match self {
            Self::Object { object, .. } => {
                object.name(name);
                object.value(value)
            }
            Self::NumberAsText(json) if name == NUMBER_AS_TEXT => value.serialize(Text {
                take: |text: &str| json.write_number(text),
                refused: ser::Error::custom("a number kept as text is no text"),
            }),
            Self::NumberAsText(_) => Err(ser::Error::custom("a number kept as text has a member beside it")),
        }
    }

    fn end(self) -> Result<(), InvalidBody> {
        match self {
            Self::Object { object, in_variant } => object.close(if in_variant { b"}}" } else { b"}" }),
            Self::NumberAsText(_) => Ok(()),
        }
    }
}

impl ser::SerializeStructVariant for Struct<'_> {
    type Ok = ();
    type Error = InvalidBody;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), InvalidBody> {
        ser::SerializeStruct::serialize_field(self, name, value)
    }

    fn end(self) -> Result<(), InvalidBody> {
        ser::SerializeStruct::end(self)
    }
}
