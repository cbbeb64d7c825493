//! A serde serializer that writes canonical JSON straight into the hasher.
//!
//! Members must be sorted, so what stands inside an object waits in a buffer until the outermost object ends; everything
//! else is on its way to the hasher. There is no tree of values in between, so features that other crates turn on in
//! serde_json cannot change the outcome.

use std::fmt::Display;

use serde::ser::{self, Serialize};
use sha2::{Digest, Sha256};

use super::member::{DecimalText, MemberName};
use super::number::{write_decimal, write_f64, write_float, write_integer};
use super::object::{OpenObjects, Opened};

/// How much gathers before it goes to the hasher: large enough that SHA-256 works on whole blocks, small enough for cache.
const FLUSH_BYTES: usize = 8 * 1024;

/// What most bodies fit, so that the buffer need not grow in steps.
const SMALL_BYTES: usize = 512;

/// serde_json's own name for a number that it keeps as text (its feature `arbitrary_precision`).
const NUMBER_AS_TEXT: &str = "$serde_json::private::Number";
/// serde_json's own name for a piece of JSON that it keeps as text (`RawValue`).
const JSON_AS_TEXT: &str = "$serde_json::private::RawValue";

/// Whether serde_json was built with `arbitrary_precision`, which alone takes a number that no `f64` holds.
#[cfg(feature = "http")]
static PARSER_GIVES_MAPS: std::sync::LazyLock<bool> =
    std::sync::LazyLock::new(|| serde_json::from_str::<serde_json::Number>("1e400").is_ok());

/// Why a body has no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidBody {
    /// NaN or an infinity: JSON has no such number, and serde_json would write `null`, which is the fingerprint of nothing.
    #[error("the body holds NaN or an infinity, which JSON cannot express; send null or a string in its place")]
    NotFinite,
    /// One object has two members of the same name, and which of them counts is anybody's guess.
    #[error("the body holds two members named {0:?} in one object; take the raw bytes' fingerprint if this must pass")]
    DuplicateMember(String),
    /// A map's key is neither a string, a character, an integer, a boolean nor a unit variant.
    #[error("the body holds a map whose key is no string; JSON has only strings there")]
    KeyIsNoString,
    /// A `serde_json::value::RawValue`: its text would have to be parsed to be made canonical, at the cost of digits.
    #[error("the body holds raw JSON text, which has no canonical form; take the fingerprint of its bytes")]
    RawJson,
    /// The value's own [`Serialize`] failed.
    #[error("the body cannot be serialized: {0}")]
    Serialize(String),
}

impl ser::Error for InvalidBody {
    fn custom<T: Display>(message: T) -> Self {
        Self::Serialize(message.to_string())
    }
}

/// The serializer. Give it to [`Serialize::serialize`] by `&mut`, then [`finish`](Self::finish).
pub(super) struct CanonicalJson {
    hasher: Sha256,
    out: Vec<u8>,
    objects: OpenObjects,
    /// Whether a map of the one member [`NUMBER_AS_TEXT`] is a number: only in what serde_json's own parser hands on.
    numbers_as_maps: bool,
    /// Whether a part has failed, also where the value's own `Serialize` went on as if nothing were.
    failed: Option<InvalidBody>,
}

impl CanonicalJson {
    pub(super) fn new(hasher: Sha256) -> Self {
        Self {
            hasher,
            out: Vec::with_capacity(SMALL_BYTES),
            objects: OpenObjects::default(),
            numbers_as_maps: false,
            failed: None,
        }
    }

    /// For what serde_json's parser hands on: where another crate has turned `arbitrary_precision` on, that gives each number
    /// as a map of one member, its text.
    #[cfg(feature = "http")]
    pub(super) fn of_parser(hasher: Sha256) -> Self {
        Self { numbers_as_maps: *PARSER_GIVES_MAPS, ..Self::new(hasher) }
    }

    pub(super) fn finish(mut self) -> Result<Sha256, InvalidBody> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.hasher.update(&self.out);
        Ok(self.hasher)
    }

    fn write(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
        self.flush_if_large();
    }

    /// Writes a number from its text, by value.
    pub(super) fn write_number(&mut self, text: &str) {
        write_decimal(&mut self.out, text);
        self.flush_if_large();
    }

    fn flush_if_large(&mut self) {
        if self.objects.is_empty() && self.out.len() >= FLUSH_BYTES {
            self.hasher.update(&self.out);
            self.out.clear();
        }
    }

    /// Writes what stands inside of another value.
    fn part<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        value.serialize(&mut *self).inspect_err(|error| self.failed = Some(error.clone()))
    }

    fn integer(&mut self, value: impl itoa::Integer) -> Result<(), InvalidBody> {
        write_integer(&mut self.out, value);
        self.flush_if_large();
        Ok(())
    }

    fn write_string(&mut self, text: &str) {
        self.out.push(b'"');
        // Looking at all bytes without a way out takes a fraction of the time: the compiler makes vectors of it.
        if text.bytes().fold(false, |any, byte| any | is_escaped(byte)) {
            self.write_escaped(text.as_bytes());
        } else {
            self.out.extend_from_slice(text.as_bytes());
        }
        self.write(b"\"");
    }

    fn write_escaped(&mut self, text: &[u8]) {
        for plain in text.split_inclusive(|byte| is_escaped(*byte)) {
            match plain.split_last() {
                Some((quoted @ (b'"' | b'\\'), plain)) => {
                    self.out.extend_from_slice(plain);
                    self.out.extend_from_slice(&[b'\\', *quoted]);
                }
                Some((control @ 0..0x20, plain)) => {
                    self.out.extend_from_slice(plain);
                    self.out.extend_from_slice(b"\\u00");
                    self.out.extend([control >> 4, control & 0xf].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
                }
                _ => self.out.extend_from_slice(plain),
            }
        }
    }

    fn open_object(&mut self) -> Object<'_> {
        let opened = self.objects.open(self.out.len());
        self.out.push(b'{');
        Object { json: self, opened }
    }

    /// `{"Variant":` of an externally tagged enum; the caller writes the value and the brace.
    fn open_variant(&mut self, variant: &str) {
        self.write(b"{");
        self.write_string(variant);
        self.write(b":");
    }
}

/// Whether JSON demands an escape.
fn is_escaped(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}

/// An array, and whether it is wrapped in `{"Variant":…}`.
pub(super) struct Array<'a> {
    json: &'a mut CanonicalJson,
    empty: bool,
    in_variant: bool,
}

impl<'a> Array<'a> {
    fn open(json: &'a mut CanonicalJson, in_variant: bool) -> Self {
        json.write(b"[");
        Self { json, empty: true, in_variant }
    }

    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        if !std::mem::take(&mut self.empty) {
            self.json.write(b",");
        }
        self.json.part(value)
    }

    fn close(self) {
        self.json.write(if self.in_variant { b"]}" } else { b"]" });
    }
}

/// An object whose members gather in the buffer, as they come, until it closes.
pub(super) struct Object<'a> {
    json: &'a mut CanonicalJson,
    opened: Opened,
}

impl Object<'_> {
    pub(super) fn name(&mut self, name: &str) {
        let CanonicalJson { objects, out, .. } = &mut *self.json;
        if objects.has_members(self.opened) {
            out.push(b',');
        }
        objects.begin_member(name, out.len());
        self.json.write_string(name);
        self.json.write(b":");
    }

    fn value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        self.json.part(value)?;
        self.json.objects.end_member(self.json.out.len());
        Ok(())
    }

    /// Closes the object, with `}`, or `}}` where a variant's brace is around it.
    fn close(self, braces: &[u8]) -> Result<(), InvalidBody> {
        let CanonicalJson { objects, out, .. } = &mut *self.json;
        objects.sort(self.opened, out)?;
        objects.close(self.opened);
        self.json.write(braces);
        Ok(())
    }

    /// The text of a number in disguise. It has no escapes, so what is written of it is its text in quotes.
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

/// A struct or a struct variant: an object, or one of serde_json's disguises.
pub(super) enum Struct<'a> {
    Object { object: Object<'a>, in_variant: bool },
    NumberAsText(&'a mut CanonicalJson),
}

impl<'a> ser::Serializer for &'a mut CanonicalJson {
    type Ok = ();
    type Error = InvalidBody;
    type SerializeSeq = Array<'a>;
    type SerializeTuple = Array<'a>;
    type SerializeTupleStruct = Array<'a>;
    type SerializeTupleVariant = Array<'a>;
    type SerializeMap = Object<'a>;
    type SerializeStruct = Struct<'a>;
    type SerializeStructVariant = Struct<'a>;

    fn serialize_bool(self, value: bool) -> Result<(), InvalidBody> {
        self.write(if value { b"true" } else { b"false" });
        Ok(())
    }

    fn serialize_i8(self, value: i8) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_i16(self, value: i16) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_i32(self, value: i32) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_i64(self, value: i64) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_i128(self, value: i128) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_u8(self, value: u8) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_u16(self, value: u16) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_u32(self, value: u32) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_u64(self, value: u64) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_u128(self, value: u128) -> Result<(), InvalidBody> {
        self.integer(value)
    }

    fn serialize_f32(self, value: f32) -> Result<(), InvalidBody> {
        if !value.is_finite() {
            return Err(InvalidBody::NotFinite);
        }
        write_float(&mut self.out, format_args!("{value:e}"));
        self.flush_if_large();
        Ok(())
    }

    fn serialize_f64(self, value: f64) -> Result<(), InvalidBody> {
        if !value.is_finite() {
            return Err(InvalidBody::NotFinite);
        }
        write_f64(&mut self.out, value);
        self.flush_if_large();
        Ok(())
    }

    fn serialize_char(self, value: char) -> Result<(), InvalidBody> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), InvalidBody> {
        self.write_string(value);
        Ok(())
    }

    /// An array of numbers, as serde_json has it.
    fn serialize_bytes(self, value: &[u8]) -> Result<(), InvalidBody> {
        self.collect_seq(value)
    }

    fn serialize_none(self) -> Result<(), InvalidBody> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), InvalidBody> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), InvalidBody> {
        self.write(b"null");
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), InvalidBody> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), InvalidBody> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), InvalidBody> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), InvalidBody> {
        self.open_variant(variant);
        value.serialize(&mut *self)?;
        self.write(b"}");
        Ok(())
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Array<'a>, InvalidBody> {
        Ok(Array::open(self, false))
    }

    fn serialize_tuple(self, _: usize) -> Result<Array<'a>, InvalidBody> {
        Ok(Array::open(self, false))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Array<'a>, InvalidBody> {
        Ok(Array::open(self, false))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Array<'a>, InvalidBody> {
        self.open_variant(variant);
        Ok(Array::open(self, true))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Object<'a>, InvalidBody> {
        Ok(self.open_object())
    }

    fn serialize_struct(self, name: &'static str, _: usize) -> Result<Struct<'a>, InvalidBody> {
        match name {
            NUMBER_AS_TEXT => Ok(Struct::NumberAsText(self)),
            JSON_AS_TEXT => Err(InvalidBody::RawJson),
            _ => Ok(Struct::Object { object: self.open_object(), in_variant: false }),
        }
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Struct<'a>, InvalidBody> {
        self.open_variant(variant);
        Ok(Struct::Object { object: self.open_object(), in_variant: true })
    }
}

macro_rules! array_like {
    ($($trait:ident :: $method:ident),*) => {$(
        impl ser::$trait for Array<'_> {
            type Ok = ();
            type Error = InvalidBody;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
                self.element(value)
            }

            fn end(self) -> Result<(), InvalidBody> {
                self.close();
                Ok(())
            }
        }
    )*};
}

array_like!(
    SerializeSeq::serialize_element,
    SerializeTuple::serialize_element,
    SerializeTupleStruct::serialize_field,
    SerializeTupleVariant::serialize_field
);

impl ser::SerializeMap for Object<'_> {
    type Ok = ();
    type Error = InvalidBody;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), InvalidBody> {
        key.serialize(MemberName(self)).inspect_err(|error| self.json.failed = Some(error.clone()))
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

impl ser::SerializeStruct for Struct<'_> {
    type Ok = ();
    type Error = InvalidBody;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), InvalidBody> {
        match self {
            Self::Object { object, .. } => {
                object.name(name);
                object.value(value)
            }
            Self::NumberAsText(json) if name == NUMBER_AS_TEXT => value.serialize(DecimalText(json)),
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
