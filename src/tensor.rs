//! Dtypes and shapes.

use std::fmt;

macro_rules! dtypes {
    ($($name:ident = $tag:literal, $bits:literal, $num:ident, $st:literal, $torch:literal, $npy:literal;)*) => {
        /// The type of a tensor's elements. The number is the one on disk (docs/FORMAT.md, "Dtypes").
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types, missing_docs)]
        pub enum Dtype { $($name = $tag,)* }

        impl Dtype {
            /// Every dtype.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$name,)*];

            /// Bits of one element.
            pub fn bits(self) -> usize { match self { $(Dtype::$name => $bits,)* } }

            /// How a codec sees the elements.
            pub fn number(self) -> Number { match self { $(Dtype::$name => Number::$num,)* } }

            /// The name in a safetensors header; "" where the format has none.
            pub fn safetensors(self) -> &'static str { match self { $(Dtype::$name => $st,)* } }

            /// The name after `torch.`; "" where torch has none.
            pub fn torch(self) -> &'static str { match self { $(Dtype::$name => $torch,)* } }

            /// The NumPy descriptor that holds the same bits.
            pub fn npy(self) -> &'static str { match self { $(Dtype::$name => $npy,)* } }
        }
    };
}

/// How a codec sees an element: its width and whether its bits are a float's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// Bytes without structure.
    Bytes,
    /// Integers of 1, 2, 4 or 8 bytes (signed or not: differences wrap), or floats of one byte.
    I8,
    #[allow(missing_docs)]
    I16,
    #[allow(missing_docs)]
    I32,
    #[allow(missing_docs)]
    I64,
    /// Floats: sign and magnitude, compared by order-mapped bits.
    F16,
    #[allow(missing_docs)]
    BF16,
    #[allow(missing_docs)]
    F32,
    #[allow(missing_docs)]
    F64,
}

dtypes! {
    BOOL = 1, 8, I8, "BOOL", "bool", "|b1";
    U8 = 2, 8, I8, "U8", "uint8", "|u1";
    I8 = 3, 8, I8, "I8", "int8", "|i1";
    U16 = 4, 16, I16, "U16", "uint16", "<u2";
    I16 = 5, 16, I16, "I16", "int16", "<i2";
    U32 = 6, 32, I32, "U32", "uint32", "<u4";
    I32 = 7, 32, I32, "I32", "int32", "<i4";
    U64 = 8, 64, I64, "U64", "uint64", "<u8";
    I64 = 9, 64, I64, "I64", "int64", "<i8";
    F16 = 10, 16, F16, "F16", "float16", "<f2";
    BF16 = 11, 16, BF16, "BF16", "bfloat16", "<u2";
    F32 = 12, 32, F32, "F32", "float32", "<f4";
    F64 = 13, 64, F64, "F64", "float64", "<f8";
    F8_E4M3 = 14, 8, I8, "F8_E4M3", "float8_e4m3fn", "|u1";
    F8_E5M2 = 15, 8, I8, "F8_E5M2", "float8_e5m2", "|u1";
    F8_E8M0 = 16, 8, I8, "F8_E8M0", "float8_e8m0fnu", "|u1";
    F8_E4M3FNUZ = 17, 8, I8, "F8_E4M3FNUZ", "float8_e4m3fnuz", "|u1";
    F8_E5M2FNUZ = 18, 8, I8, "F8_E5M2FNUZ", "float8_e5m2fnuz", "|u1";
    C64 = 19, 64, F32, "C64", "complex64", "<c8";
    C128 = 20, 128, F64, "", "complex128", "<c16";
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        self.bits() / 8
    }

    /// The dtype with this number on disk.
    pub fn from_tag(tag: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|d| *d as u8 == tag)
    }

    /// The dtype with this name in a safetensors header.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|d| !name.is_empty() && d.safetensors() == name)
    }

    /// The dtype with this name after `torch.`.
    pub fn from_torch(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|d| !name.is_empty() && d.torch() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.torch())
    }
}

impl Number {
    /// Bytes of one number.
    pub fn width(self) -> usize {
        match self {
            Number::Bytes | Number::I8 => 1,
            Number::I16 | Number::F16 | Number::BF16 => 2,
            Number::I32 | Number::F32 => 4,
            Number::I64 | Number::F64 => 8,
        }
    }

    /// Whether the bits are a float's (sign and magnitude).
    pub fn is_float(self) -> bool {
        matches!(self, Number::F16 | Number::BF16 | Number::F32 | Number::F64)
    }

    /// The number on disk.
    pub fn tag(self) -> u8 {
        match self {
            Number::Bytes => 0,
            Number::I8 => 1,
            Number::I16 => 2,
            Number::I32 => 3,
            Number::I64 => 4,
            Number::F16 => 5,
            Number::BF16 => 6,
            Number::F32 => 7,
            Number::F64 => 8,
        }
    }

    /// The inverse of [`Number::tag`].
    pub fn from_tag(tag: u8) -> Option<Self> {
        use Number::{BF16, Bytes, F16, F32, F64, I8, I16, I32, I64};
        [Bytes, I8, I16, I32, I64, F16, BF16, F32, F64]
            .get(usize::from(tag))
            .copied()
    }
}

/// The number of elements of `shape`, unless it overflows. A shape without dimensions is a scalar: one element.
pub fn elements(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))
}

/// Row-major strides of `shape`, in elements, as torch gives them (dimensions of size 0 count as 1).
pub fn contiguous_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1u64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i].max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_names_are_unique() {
        for d in Dtype::ALL {
            assert_eq!(Dtype::from_tag(*d as u8), Some(*d));
            assert_eq!(Dtype::from_torch(d.torch()), Some(*d));
            assert!(d.safetensors().is_empty() || Dtype::from_safetensors(d.safetensors()) == Some(*d));
        }
        for t in 0..9 {
            assert_eq!(Number::from_tag(t).unwrap().tag(), t);
        }
        assert_eq!(Number::from_tag(9), None);
    }

    #[test]
    fn shapes() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[0, u64::MAX, 2]), Some(0));
        assert_eq!(elements(&[u64::MAX, 2]), None);
        assert_eq!(contiguous_strides(&[2, 3, 4]), [12, 4, 1]);
    }
}
