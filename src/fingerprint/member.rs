//! Two small serializers for what must be text: the name of a map's member, and a number that serde_json kept as text.

use serde::ser::{Impossible, Serialize, Serializer};

use super::canonical::{CanonicalJson, InvalidBody, Object};

/// Takes a map's key and begins a member of that name. As in serde_json, integers, booleans, characters and unit variants
/// stand for their text.
pub(super) struct MemberName<'a, 'json>(pub(super) &'a mut Object<'json>);

/// Takes the text of a number and writes it by value.
pub(super) struct DecimalText<'a>(pub(super) &'a mut CanonicalJson);

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
    ($error:expr; $($method:ident($($type:ty),*) -> $ok:ty),*) => {$(
        fn $method(self, $(_: $type),*) -> Result<$ok, InvalidBody> {
            Err($error)
        }
    )*};
}

macro_rules! refused_compounds {
    ($error:expr) => {
        type Ok = ();
        type Error = InvalidBody;
        type SerializeSeq = Impossible<(), InvalidBody>;
        type SerializeTuple = Impossible<(), InvalidBody>;
        type SerializeTupleStruct = Impossible<(), InvalidBody>;
        type SerializeTupleVariant = Impossible<(), InvalidBody>;
        type SerializeMap = Impossible<(), InvalidBody>;
        type SerializeStruct = Impossible<(), InvalidBody>;
        type SerializeStructVariant = Impossible<(), InvalidBody>;

        refused!(
            $error;
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
            Err($error)
        }

        as_text!(
            serialize_bool(bool),
            serialize_char(char)
        );
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

        fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), InvalidBody> {
            self.serialize_str(variant)
        }
    };
}

impl Serializer for MemberName<'_, '_> {
    refused_compounds!(InvalidBody::KeyIsNoString);

    fn serialize_str(self, name: &str) -> Result<(), InvalidBody> {
        self.0.name(name);
        Ok(())
    }
}

impl Serializer for DecimalText<'_> {
    refused_compounds!(InvalidBody::Serialize("a number kept as text is no text".to_owned()));

    fn serialize_str(self, text: &str) -> Result<(), InvalidBody> {
        self.0.write_number(text);
        Ok(())
    }
}
