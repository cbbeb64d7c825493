//! The serializer: which text stands for a value of each kind.

use serde::ser::{Serialize, Serializer};

use super::array::Array;
use super::number::{write_f64, write_float};
use super::object::{NUMBER_AS_TEXT, Object, Struct};
use super::writer::CanonicalJson;
use crate::fingerprint::invalid_body::InvalidBody;

/// serde_json's private name for a piece of JSON that it keeps as text (`RawValue`).
const JSON_AS_TEXT: &str = "$serde_json::private::RawValue";

macro_rules! integers {
    ($($method:ident($type:ty)),*) => {$(
        fn $method(self, value: $type) -> Result<(), InvalidBody> {
            self.write_integer(value);
            Ok(())
        }
    )*};
}

impl<'a> Serializer for &'a mut CanonicalJson {
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
        Ok(Array::open(self))
    }

    fn serialize_tuple(self, _: usize) -> Result<Array<'a>, InvalidBody> {
        Ok(Array::open(self))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Array<'a>, InvalidBody> {
        Ok(Array::open(self))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Array<'a>, InvalidBody> {
        Ok(Array::open_variant(self, variant))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Object<'a>, InvalidBody> {
        Ok(Object::open(self))
    }

    fn serialize_struct(self, name: &'static str, _: usize) -> Result<Struct<'a>, InvalidBody> {
        match name {
            NUMBER_AS_TEXT => Ok(Struct::NumberAsText(self)),
            JSON_AS_TEXT => Err(InvalidBody::RawJson),
            _ => Ok(Struct::Object { object: Object::open(self), in_variant: false }),
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
        Ok(Struct::Object { object: Object::open(self), in_variant: true })
    }
}
