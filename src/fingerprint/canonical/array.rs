//! Arrays: sequences, tuples, and the tuples of enum variants.

use serde::ser::{self, Serialize};

use super::writer::CanonicalJson;
use crate::fingerprint::invalid_body::InvalidBody;

/// An open array. It may be wrapped in `{"Variant":…}`.
pub(in crate::fingerprint) struct Array<'a> {
    json: &'a mut CanonicalJson,
    empty: bool,
    in_variant: bool,
}

impl<'a> Array<'a> {
    pub(super) fn open(json: &'a mut CanonicalJson) -> Self {
        json.write(b"[");
        Self { json, empty: true, in_variant: false }
    }

    pub(super) fn open_variant(json: &'a mut CanonicalJson, variant: &str) -> Self {
        json.open_variant(variant);
        Self { in_variant: true, ..Self::open(json) }
    }

    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        if !std::mem::take(&mut self.empty) {
            self.json.write(b",");
        }
        self.json.write_part(value)
    }

    fn close(self) {
        self.json.write(if self.in_variant { b"]}" } else { b"]" });
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
