//! The serializer: which text stands for a value of each kind.

use serde::ser::{Serialize, Serializer};

use super::container::{Container, NUMBER_AS_TEXT};
use super::number::{write_f32, write_f64};
use super::writer::CanonicalJson;
use crate::fingerprint::invalid_body::InvalidBody;

/// serde_json's private name for a piece of JSON that it keeps as text (`RawValue`).
const JSON_AS_TEXT: &str = "$serde_json::private::RawValue";

macro_rules! integers {
    ($($method:ident($type:ty)),*) => {$(
        fn $method(self, value: $type) -> Result<(), InvalidBody> {
            self.write_plain(itoa::Buffer::new().format(value));
            Ok(())
        }
    )*};
}

macro_rules! floats {
    ($($method:ident($type:ty) => $write:ident),*) => {$(
        fn $method(self, value: $type) -> Result<(), InvalidBody> {
            self.refuse_as_name()?;
            if !value.is_finite() {
                return Err(InvalidBody::NotFinite);
            }
            $write(&mut self.out, value);
            Ok(())
        }
    )*};
}

impl CanonicalJson {
    /// Writes `{"Variant":` of an externally tagged enum. The value and a closing brace follow.
    fn open_variant(&mut self, variant: &str) -> Result<&mut Self, InvalidBody> {
        self.refuse_as_name()?;
        self.out.push(b'{');
        self.write_string(variant);
        self.out.push(b':');
        Ok(self)
    }
}

type Opened<'a> = Result<Container<'a>, InvalidBody>;

impl<'a> Serializer for &'a mut CanonicalJson {
    type Ok = ();
    type Error = InvalidBody;
    type SerializeSeq = Container<'a>;
    type SerializeTuple = Container<'a>;
    type SerializeTupleStruct = Container<'a>;
    type SerializeTupleVariant = Container<'a>;
    type SerializeMap = Container<'a>;
    type SerializeStruct = Container<'a>;
    type SerializeStructVariant = Container<'a>;

    fn serialize_bool(self, value: bool) -> Result<(), InvalidBody> {
        self.write_plain(if value { "true" } else { "false" });
        Ok(())
    }

    integers!(
        serialize_i8(i8),
        serialize_i16(i16),
        serialize_i32(i32),
        serialize_i64(i64),
        serialize_i128(i128),
        serialize_u8(u8),
        serialize_u16(u16),
        serialize_u32(u32),
        serialize_u64(u64),
        serialize_u128(u128)
    );

    floats!(serialize_f32(f32) => write_f32, serialize_f64(f64) => write_f64);

    fn serialize_char(self, value: char) -> Result<(), InvalidBody> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), InvalidBody> {
        if self.in_name {
            self.write_name(value)
        } else {
            self.write_string(value)
        }
        Ok(())
    }

    /// An array of numbers, as in serde_json.
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
        self.refuse_as_name()?;
        self.out.extend_from_slice(b"null");
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
        value.serialize(self.open_variant(variant)?)?;
        self.out.push(b'}');
        Ok(())
    }

    fn serialize_seq(self, _: Option<usize>) -> Opened<'a> {
        Container::open(self, b'[', b"]", false)
    }

    fn serialize_tuple(self, _: usize) -> Opened<'a> {
        Container::open(self, b'[', b"]", false)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Opened<'a> {
        Container::open(self, b'[', b"]", false)
    }

    fn serialize_tuple_variant(self, _: &'static str, _: u32, variant: &'static str, _: usize) -> Opened<'a> {
        Container::open(self.open_variant(variant)?, b'[', b"]}", false)
    }

    fn serialize_map(self, _: Option<usize>) -> Opened<'a> {
        let may_be_number = self.numbers_as_maps;
        Container::open(self, b'{', b"}", may_be_number)
    }

    fn serialize_struct(self, name: &'static str, _: usize) -> Opened<'a> {
        if name == JSON_AS_TEXT && !self.in_name {
            return Err(InvalidBody::RawJson);
        }
        Container::open(self, b'{', b"}", name == NUMBER_AS_TEXT)
    }

    fn serialize_struct_variant(self, _: &'static str, _: u32, variant: &'static str, _: usize) -> Opened<'a> {
        Container::open(self.open_variant(variant)?, b'{', b"}}", false)
    }
}
