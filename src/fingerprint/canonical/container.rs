//! Arrays and objects: sequences, tuples, maps, structs, and those of enum variants.

use serde::ser::{self, Serialize};

use super::number::write_decimal;
use super::writer::{CanonicalJson, Member};
use crate::fingerprint::invalid_body::InvalidBody;

/// serde_json's private name for a number that it keeps as text (its feature `arbitrary_precision`).
pub(super) const NUMBER_AS_TEXT: &str = "$serde_json::private::Number";

/// An open array or object. The members of an object gather in the buffer, in the order in which they come, until it
/// closes.
pub(in crate::fingerprint) struct Container<'a> {
    json: &'a mut CanonicalJson,
    closing: &'static [u8],
    /// Whether it is a number if its one member has the name [`NUMBER_AS_TEXT`].
    may_be_number: bool,
    /// Where it begins: its bracket in the text, among the members, and among the names.
    at: usize,
    members: usize,
    names: usize,
}

impl<'a> Container<'a> {
    pub(super) fn open(
        json: &'a mut CanonicalJson,
        opening: u8,
        closing: &'static [u8],
        may_be_number: bool,
    ) -> Result<Self, InvalidBody> {
        json.refuse_as_name()?;
        let (at, members, names) = (json.out.len(), json.members.len(), json.names.len());
        json.out.push(opening);
        Ok(Self { json, closing, may_be_number, at, members, names })
    }

    /// Writes the comma in front of every element or member but the first.
    fn separate(&mut self) {
        if self.json.out.len() > self.at + 1 {
            self.json.out.push(b',');
        }
    }

    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        self.separate();
        self.json.write_part(value)
    }

    fn member<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) -> Result<(), InvalidBody> {
        self.separate();
        self.json.write_name(name);
        self.value(value)
    }

    fn value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        self.json.write_part(value)?;
        // The members of the objects in the value are gone, so the last one is the value's.
        if let Some(member) = self.json.members.last_mut() {
            member.text.end = self.json.out.len();
        }
        Ok(())
    }

    fn close(mut self) -> Result<(), InvalidBody> {
        if let Some(number) = self.number_as_text() {
            self.json.out.truncate(self.at);
            write_decimal(&mut self.json.out, &number);
        } else {
            self.sort()?;
            self.json.out.extend_from_slice(self.closing);
        }
        self.json.members.truncate(self.members);
        self.json.names.truncate(self.names);
        Ok(())
    }

    /// The text of the number, if this is one. The text has no escapes, so the buffer holds it in quotes.
    fn number_as_text(&self) -> Option<String> {
        let [member] = &self.json.members[self.members..] else { return None };
        let written = str::from_utf8(&self.json.out[member.text.clone()]).ok().filter(|_| self.may_be_number)?;
        let text = written.strip_prefix('"')?.strip_prefix(NUMBER_AS_TEXT)?.strip_prefix("\":\"")?.strip_suffix('"')?;
        Some(text.to_owned())
    }

    fn sort(&mut self) -> Result<(), InvalidBody> {
        let CanonicalJson { out, members, names, .. } = &mut *self.json;
        let members = &mut members[self.members..];
        // The order of UTF-8 bytes is the order of code points.
        let name = |member: &Member| &names[member.name.clone()];
        if members.is_sorted_by(|a, b| name(a) < name(b)) {
            return Ok(());
        }
        members.sort_unstable_by(|a, b| name(a).cmp(name(b)));
        if let Some(pair) = members.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
            return Err(InvalidBody::DuplicateMember(String::from_utf8_lossy(name(&pair[0])).into_owned()));
        }

        // The sorted members are as long as the unsorted ones, over which they move.
        let unsorted = out.len();
        for member in members {
            out.push(b',');
            out.extend_from_within(member.text.clone());
        }
        out.copy_within(unsorted + 1.., self.at + 1);
        out.truncate(unsorted);
        Ok(())
    }
}

macro_rules! container {
    ($($trait:ident :: $method:ident($($name:ident)?) => $write:ident),*) => {$(
        impl ser::$trait for Container<'_> {
            type Ok = ();
            type Error = InvalidBody;

            fn $method<T: Serialize + ?Sized>(
                &mut self,
                $($name: &'static str,)?
                value: &T,
            ) -> Result<(), InvalidBody> {
                self.$write($($name,)? value)
            }

            fn end(self) -> Result<(), InvalidBody> {
                self.close()
            }
        }
    )*};
}

container!(
    SerializeSeq::serialize_element() => element,
    SerializeTuple::serialize_element() => element,
    SerializeTupleStruct::serialize_field() => element,
    SerializeTupleVariant::serialize_field() => element,
    SerializeStruct::serialize_field(name) => member,
    SerializeStructVariant::serialize_field(name) => member
);

impl ser::SerializeMap for Container<'_> {
    type Ok = ();
    type Error = InvalidBody;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), InvalidBody> {
        self.separate();
        self.json.in_name = true;
        let written = self.json.write_part(key);
        self.json.in_name = false;
        written
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        self.value(value)
    }

    fn end(self) -> Result<(), InvalidBody> {
        self.close()
    }
}
