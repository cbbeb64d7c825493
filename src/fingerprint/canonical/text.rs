//! A serializer for values that must be text: the name of a map's member, and a number that serde_json kept as text.

use serde::ser::{Impossible, Serialize, Serializer};

use crate::fingerprint::invalid_body::InvalidBody;

/// Gives the text of a value to `take`. As in serde_json, integers, booleans, characters and unit variants stand for
/// their text. Any other value is `refused`.
pub(super) struct Text<F> {
    pub(super) take: F,
    pub(super) refused: InvalidBody,
}

macro_rules! as_text {
    ($($method:ident($type:ty)),*) => {$(
        fn $method(self, value: $type) -> Result<(), InvalidBody> {
            self.serialize_str(&value.to_string())
        }
    )*};
}

macro_rules! as_digits {
    ($($method:ident($type:ty)),*) => {$(
        fn $method(self, value: $type) -> Result<(), InvalidBody> {
            self.serialize_str(itoa::Buffer::new().format(value))
        }
    )*};
}

macro_rules! refused {
    ($($method:ident($($type:ty),*) -> $ok:ty),*) => {$(
        fn $method(self, $(_: $type),*) -> Result<$ok, InvalidBody> {
            Err(self.refused)
        }
    )*};
}

impl<F: FnOnce(&str)> Serializer for Text<F> {
    type Ok = ();
    type Error = InvalidBody;
    type SerializeSeq = Impossible<(), InvalidBody>;
    type SerializeTuple = Impossible<(), InvalidBody>;
    type SerializeTupleStruct = Impossible<(), InvalidBody>;
    type SerializeTupleVariant = Impossible<(), InvalidBody>;
    type SerializeMap = Impossible<(), InvalidBody>;
    type SerializeStruct = Impossible<(), InvalidBody>;
    type SerializeStructVariant = Impossible<(), InvalidBody>;

    fn serialize_str(self, text: &str) -> Result<(), InvalidBody> {
        (self.take)(text);
        Ok(())
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), InvalidBody> {
        self.serialize_str(variant)
    }

    as_text!(serialize_bool(bool), serialize_char(char));

    as_digits!(
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

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), InvalidBody> {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), InvalidBody> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<(), InvalidBody> {
        Err(self.refused)
    }

    refused!(
        serialize_f32(f32) -> (),
        serialize_f64(f64) -> (),
        serialize_bytes(&[u8]) -> (),
        serialize_none() -> (),
        serialize_unit() -> (),
        serialize_unit_struct(&'static str) -> (),
        serialize_seq(Option<usize>) -> Self::SerializeSeq,
        serialize_tuple(usize) -> Self::SerializeTuple,
        serialize_tuple_struct(&'static str, usize) -> Self::SerializeTupleStruct,
        serialize_tuple_variant(&'static str, u32, &'static str, usize) -> Self::SerializeTupleVariant,
        serialize_map(Option<usize>) -> Self::SerializeMap,
        serialize_struct(&'static str, usize) -> Self::SerializeStruct,
        serialize_struct_variant(&'static str, u32, &'static str, usize) -> Self::SerializeStructVariant
    );
}
