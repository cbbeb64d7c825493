//! Writing a response so that it decodes as what it was.
//!
//! serde_json writes NaN and the infinities as `null`, and `Some` as what is in it; an `Option` reads `null` as `None`.
//! So `Some(f64::NAN)` and `Some(())` would be replayed as `None`. This serializer refuses both, and hands everything
//! else on.

use std::fmt::Display;

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

impl<S: Serializer> Checked<S> {
    fn null(&self) -> Result<(), S::Error> {
        match self.place {
            Place::Some => Err(null_in_some()),
            _ => Ok(()),
        }
    }
}

fn null_in_some<E: ser::Error>() -> E {
    E::custom("it holds a `Some` whose value is stored as null, and null reads as `None`")
}

fn finite<E: ser::Error>(finite: bool) -> Result<(), E> {
    if finite { Ok(()) } else { Err(E::custom("it holds a float that is not finite, which is stored as null")) }
}

macro_rules! hand_on {
    ($($method:ident($type:ty)),*) => {$(
        fn $method(self, value: $type) -> Result<S::Ok, S::Error> {
            self.inner.$method(value)
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
        serialize_bool(bool), serialize_char(char), serialize_bytes(&[u8]),
        serialize_i8(i8), serialize_i16(i16), serialize_i32(i32), serialize_i64(i64), serialize_i128(i128),
        serialize_u8(u8), serialize_u16(u16), serialize_u32(u32), serialize_u64(u64), serialize_u128(u128)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }

    fn serialize_f32(self, value: f32) -> Result<S::Ok, S::Error> {
        finite(value.is_finite())?;
        self.inner.serialize_f32(value)
    }

    fn serialize_f64(self, value: f64) -> Result<S::Ok, S::Error> {
        finite(value.is_finite())?;
        self.inner.serialize_f64(value)
    }

    fn serialize_str(self, value: &str) -> Result<S::Ok, S::Error> {
        if self.place == Place::RawJsonInSome && value.trim() == "null" {
            return Err(null_in_some());
        }
        self.inner.serialize_str(value)
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.collect_str(value)
    }

    fn serialize_none(self) -> Result<S::Ok, S::Error> {
        self.null()?;
        self.inner.serialize_none()
    }

    fn serialize_unit(self) -> Result<S::Ok, S::Error> {
        self.null()?;
        self.inner.serialize_unit()
    }

    fn serialize_unit_struct(self, name: &'static str) -> Result<S::Ok, S::Error> {
        self.null()?;
        self.inner.serialize_unit_struct(name)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.serialize_some(&Faithful { value, place: Place::Some })
    }

    /// JSON shows nothing of it, so what is around it is around its value.
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        self.inner.serialize_newtype_struct(name, &Faithful { value, place: self.place })
    }

    fn serialize_unit_variant(self, name: &'static str, index: u32, variant: &'static str) -> Result<S::Ok, S::Error> {
        self.inner.serialize_unit_variant(name, index, variant)
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

    fn serialize_seq(self, length: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        Ok(part(self.inner.serialize_seq(length)?))
    }

    fn serialize_tuple(self, length: usize) -> Result<Self::SerializeTuple, S::Error> {
        Ok(part(self.inner.serialize_tuple(length)?))
    }

    fn serialize_tuple_struct(self, name: &'static str, length: usize) -> Result<Self::SerializeTupleStruct, S::Error> {
        Ok(part(self.inner.serialize_tuple_struct(name, length)?))
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        Ok(part(self.inner.serialize_tuple_variant(name, index, variant, length)?))
    }

    fn serialize_map(self, length: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        Ok(part(self.inner.serialize_map(length)?))
    }

    fn serialize_struct(self, name: &'static str, length: usize) -> Result<Self::SerializeStruct, S::Error> {
        let place = match (self.place, name) {
            (Place::Some, JSON_AS_TEXT) => Place::RawJsonInSome,
            _ => Place::Anywhere,
        };
        Ok(Checked { inner: self.inner.serialize_struct(name, length)?, place })
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        Ok(part(self.inner.serialize_struct_variant(name, index, variant, length)?))
    }
}

fn part<S>(inner: S) -> Checked<S> {
    Checked { inner, place: Place::Anywhere }
}

macro_rules! elements {
    ($($trait:ident :: $method:ident),*) => {$(
        impl<S: ser::$trait> ser::$trait for Checked<S> {
            type Ok = S::Ok;
            type Error = S::Error;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
                self.inner.$method(&Faithful::new(value))
            }

            fn end(self) -> Result<S::Ok, S::Error> {
                self.inner.end()
            }
        }
    )*};
}

elements!(
    SerializeSeq::serialize_element,
    SerializeTuple::serialize_element,
    SerializeTupleStruct::serialize_field,
    SerializeTupleVariant::serialize_field
);

macro_rules! fields {
    ($($trait:ident),*) => {$(
        impl<S: ser::$trait> ser::$trait for Checked<S> {
            type Ok = S::Ok;
            type Error = S::Error;

            fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), S::Error> {
                self.inner.serialize_field(name, &Faithful { value, place: self.place })
            }

            fn skip_field(&mut self, name: &'static str) -> Result<(), S::Error> {
                self.inner.skip_field(name)
            }

            fn end(self) -> Result<S::Ok, S::Error> {
                self.inner.end()
            }
        }
    )*};
}

fields!(SerializeStruct, SerializeStructVariant);

/// A name is a string in JSON, or refused by serde_json: a key needs no look.
impl<S: ser::SerializeMap> ser::SerializeMap for Checked<S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
        self.inner.serialize_key(key)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        self.inner.serialize_value(&Faithful::new(value))
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        self.inner.end()
    }
}
