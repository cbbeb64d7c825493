//! Writing a response so that it decodes as what it was.
//!
//! serde_json writes NaN and the infinities as `null`, and `Some` as what is in it; an `Option` reads `null` as `None`.
//! So `Some(f64::NAN)` and `Some(())` would be replayed as `None`. This serializer refuses both, and hands everything
//! else on.

use serde::ser::{self, Serialize, Serializer};

/// What serde_json names the struct that a `RawValue` pretends to be; its one member is the JSON text.
const JSON_AS_TEXT: &str = "$serde_json::private::RawValue";

/// A value that fails to serialize where it would come back as another.
pub(super) struct Faithful<'a, T: ?Sized> {
    value: &'a T,
    place: Place,
}

impl<'a, T: ?Sized> Faithful<'a, T> {
    pub(super) fn new(value: &'a T) -> Self {
        Self { value, place: Place::Anywhere }
    }
}

/// What is around a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Anywhere,
    /// `Some` is, and nothing of its own: a `null` here reads as `None`.
    Some,
    /// The same, and the value is JSON text.
    RawJsonInSome,
}

impl<T: Serialize + ?Sized> Serialize for Faithful<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(Checked { inner: serializer, place: self.place })
    }
}

/// A serializer, or one of its parts, that hands on what is faithful.
struct Checked<S> {
    inner: S,
    place: Place,
}

fn null_in_some<E: ser::Error>() -> E {
    E::custom("it holds a `Some` whose value is stored as null, and null reads as `None`")
}

fn not_finite<E: ser::Error>() -> E {
    E::custom("it holds a float that is not finite, which is stored as null")
}

macro_rules! hand_on {
    ($($method:ident($($argument:ident: $type:ty),*)),*) => {$(
        fn $method(self, $($argument: $type),*) -> Result<S::Ok, S::Error> {
            self.inner.$method($($argument),*)
        }
    )*};
}

macro_rules! floats {
    ($($method:ident($type:ty)),*) => {$(
        fn $method(self, value: $type) -> Result<S::Ok, S::Error> {
            if value.is_finite() { self.inner.$method(value) } else { Err(not_finite()) }
        }
    )*};
}

macro_rules! nulls {
    ($($method:ident($($argument:ident: $type:ty)?)),*) => {$(
        fn $method(self, $($argument: $type)?) -> Result<S::Ok, S::Error> {
            if self.place == Place::Some { Err(null_in_some()) } else { self.inner.$method($($argument)?) }
        }
    )*};
}

macro_rules! containers {
    ($($method:ident($($argument:ident: $type:ty),*) -> $container:ident),*) => {$(
        fn $method(self, $($argument: $type),*) -> Result<Self::$container, S::Error> {
            Ok(Checked { inner: self.inner.$method($($argument),*)?, place: Place::Anywhere })
        }
    )*};
}

impl<S: Serializer> Serializer for Checked<S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Checked<S::SerializeSeq>;
    type SerializeTuple = Checked<S::SerializeTuple>;
    type SerializeTupleStruct = Checked<S::SerializeTupleStruct>;
    type SerializeTupleVariant = Checked<S::SerializeTupleVariant>;
    type SerializeMap = Checked<S::SerializeMap>;
    type SerializeStruct = Checked<S::SerializeStruct>;
    type SerializeStructVariant = Checked<S::SerializeStructVariant>;

    hand_on! {
        serialize_bool(value: bool), serialize_char(value: char), serialize_bytes(value: &[u8]),
        serialize_i8(value: i8), serialize_i16(value: i16), serialize_i32(value: i32), serialize_i64(value: i64),
        serialize_u8(value: u8), serialize_u16(value: u16), serialize_u32(value: u32), serialize_u64(value: u64),
        serialize_i128(value: i128), serialize_u128(value: u128),
        serialize_unit_variant(name: &'static str, index: u32, variant: &'static str)
    }

    floats!(serialize_f32(f32), serialize_f64(f64));

    nulls!(serialize_none(), serialize_unit(), serialize_unit_struct(name: &'static str));

    containers! {
        serialize_seq(length: Option<usize>) -> SerializeSeq,
        serialize_tuple(length: usize) -> SerializeTuple,
        serialize_tuple_struct(name: &'static str, length: usize) -> SerializeTupleStruct,
        serialize_tuple_variant(name: &'static str, index: u32, variant: &'static str, length: usize)
            -> SerializeTupleVariant,
        serialize_map(length: Option<usize>) -> SerializeMap,
        serialize_struct_variant(name: &'static str, index: u32, variant: &'static str, length: usize)
            -> SerializeStructVariant
    }

    fn serialize_struct(self, name: &'static str, length: usize) -> Result<Self::SerializeStruct, S::Error> {
        let raw_json_in_some = self.place == Place::Some && name == JSON_AS_TEXT;
        let place = if raw_json_in_some { Place::RawJsonInSome } else { Place::Anywhere };
        Ok(Checked { inner: self.inner.serialize_struct(name, length)?, place })
    }

    fn serialize_str(self, value: &str) -> Result<S::Ok, S::Error> {
        let null = self.place == Place::RawJsonInSome && value.trim() == "null";
        if null { Err(null_in_some()) } else { self.inner.serialize_str(value) }
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.serialize_some(&Faithful { value, place: Place::Some })
    }

    /// JSON shows nothing of it, so what is around it is around its value.
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.serialize_newtype_struct(name, &Faithful { value, place: self.place })
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.inner.serialize_newtype_variant(name, index, variant, &Faithful::new(value))
    }
}

macro_rules! parts {
    ($($trait:ident::$method:ident($($name:ident)?) $({ $($key:tt)* })?),*) => {$(
        impl<S: ser::$trait> ser::$trait for Checked<S> {
            type Ok = S::Ok;
            type Error = S::Error;

            $($($key)*)?

            fn $method<T: Serialize + ?Sized>(&mut self, $($name: &'static str,)? value: &T) -> Result<(), S::Error> {
                self.inner.$method($($name,)? &Faithful { value, place: self.place })
            }

            fn end(self) -> Result<S::Ok, S::Error> {
                self.inner.end()
            }
        }
    )*};
}

parts!(
    SerializeSeq::serialize_element(),
    SerializeTuple::serialize_element(),
    SerializeTupleStruct::serialize_field(),
    SerializeTupleVariant::serialize_field(),
    SerializeStruct::serialize_field(name),
    SerializeStructVariant::serialize_field(name),
    SerializeMap::serialize_value() {
        /// A name is a string in JSON, or refused by serde_json: a key needs no check.
        fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
            self.inner.serialize_key(key)
        }
    }
);
