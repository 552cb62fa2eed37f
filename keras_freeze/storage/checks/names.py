"""The names of Keras that a configuration in a `.freeze` file may contain.

Everything else is refused, so that additions of a later Keras version have to be reviewed first.
Left out on purpose: layers that hold code or open files (Lambda, TFSMLayer, JaxLayer, FlaxLayer,
TorchModuleWrapper), and operations that call a function (Map, Cond, Switch, Scan, WhileLoop, ...).
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYERS = _names("""
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average AveragePooling1D
    AveragePooling2D AveragePooling3D BatchNormalization Bidirectional CategoryEncoding CenterCrop
    Concatenate ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D
    Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Cropping1D Cropping2D
    Cropping3D CutMix Dense DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU
    EinsumDense Embedding Equalization Flatten GRU GRUCell GaussianDropout GaussianNoise
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
    GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization GroupQueryAttention HashedCrossing
    Hashing Identity InputLayer IntegerLookup LSTM LSTMCell LayerNormalization LeakyReLU Masking
    MaxNumBoundingBoxes MaxPooling1D MaxPooling2D MaxPooling3D Maximum MelSpectrogram Minimum
    MixUp MultiHeadAttention Multiply Normalization PReLU Permute Pipeline RMSNormalization RNN
    RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast
    RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale
    RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation
    RandomSharpness RandomShear RandomTranslation RandomZoom ReLU RepeatVector Rescaling Reshape
    Resizing ReversibleEmbedding STFTSpectrogram SeparableConv1D SeparableConv2D SimpleRNN
    SimpleRNNCell Softmax Solarization SpatialDropout1D SpatialDropout2D SpatialDropout3D
    SpectralNormalization StackedRNNCells StringLookup Subtract TextVectorization TimeDistributed
    UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D
    ZeroPadding3D
""")
"""In `keras.layers`."""

INITIALIZERS = _names("""
    Constant GlorotNormal GlorotUniform HeNormal HeUniform Identity LecunNormal LecunUniform Ones
    Orthogonal RandomNormal RandomUniform STFT TruncatedNormal VarianceScaling Zeros
""")
"""In `keras.initializers`."""

REGULARIZERS = _names("""
    L1 L1L2 L2 OrthogonalRegularizer
""")
"""In `keras.regularizers`."""

CONSTRAINTS = _names("""
    MaxNorm MinMaxNorm NonNeg UnitNorm
""")
"""In `keras.constraints`."""

LOSSES = _names("""
    BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy
    CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy CategoricalHinge Circle
    CosineSimilarity Dice Hinge Huber KLDivergence LogCosh MeanAbsoluteError
    MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    SparseCategoricalCrossentropy SquaredHinge Tversky
""")
"""In `keras.losses`."""

METRICS = _names("""
    AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy
    CategoricalCrossentropy CategoricalHinge ConcordanceCorrelation CosineSimilarity F1Score
    FBetaScore FalseNegatives FalsePositives Hinge IoU KLDivergence LogCoshError Mean
    MeanAbsoluteError MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanSquaredError
    MeanSquaredLogarithmicError OneHotIoU OneHotMeanIoU PearsonCorrelation Poisson Precision
    PrecisionAtRecall R2Score Recall RecallAtPrecision RootMeanSquaredError
    SensitivityAtSpecificity SparseCategoricalAccuracy SparseCategoricalCrossentropy
    SparseTopKCategoricalAccuracy SpecificityAtSensitivity SquaredHinge Sum
    TopKCategoricalAccuracy TrueNegatives TruePositives
""")
"""In `keras.metrics`."""

OPTIMIZERS = _names("""
    Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion LossScaleOptimizer MultiOptimizer
    Muon Nadam RMSprop SGD ScheduleFreeAdamW
""")
"""In `keras.optimizers`."""

SCHEDULES = _names("""
    CosineDecay CosineDecayRestarts ExponentialDecay InverseTimeDecay PiecewiseConstantDecay
    PolynomialDecay
""")
"""In `keras.optimizers.schedules`."""

POLICIES = _names("""
    DTypePolicyMap Int4DTypePolicy QuantizedDTypePolicy QuantizedFloat8DTypePolicy
""")
"""In `keras.dtype_policies`."""

QUANTIZATION = _names("""
    AbsMaxQuantizer Float8QuantizationConfig Int4QuantizationConfig Int8QuantizationConfig
""")
"""In `keras.quantizers`."""

ACTIVATION_FUNCTIONS = _names("""
    celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear
    log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus
    softsign sparse_plus sparse_sigmoid sparsemax squareplus tanh tanh_shrink threshold
""")
"""In `keras.activations`."""

LOSS_FUNCTIONS = _names("""
    binary_crossentropy binary_focal_crossentropy categorical_crossentropy
    categorical_focal_crossentropy categorical_generalized_cross_entropy categorical_hinge circle
    cosine_similarity ctc dice hinge huber kl_divergence log_cosh mean_absolute_error
    mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error poisson
    sparse_categorical_crossentropy squared_hinge tversky
""")
"""In `keras.losses` or `keras.metrics`."""

METRIC_FUNCTIONS = _names("""
    binary_accuracy binary_crossentropy binary_focal_crossentropy categorical_accuracy
    categorical_crossentropy categorical_focal_crossentropy categorical_generalized_cross_entropy
    categorical_hinge circle concordance_correlation cosine_similarity ctc dice hinge huber
    kl_divergence log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error pearson_correlation poisson sparse_categorical_accuracy
    sparse_categorical_crossentropy sparse_top_k_categorical_accuracy squared_hinge
    top_k_categorical_accuracy tversky
""")
"""In `keras.metrics` or `keras.losses`."""

OPERATIONS = {
    "keras.src.ops.core": _names("""
        Cast ConvertToTensor SaturateCast Scatter ScatterUpdate Slice SliceUpdate StopGradient
        Unstack
    """),
    "keras.src.ops.einops": _names("""
        Rearrange
    """),
    "keras.src.ops.image": _names("""
        AffineTransform CropImages ElasticTransform ExtractPatches GaussianBlur HSVToRGB
        MapCoordinates PadImages PerspectiveTransform RGBToGrayscale RGBToHSV Resize SSIM
        ScaleAndTranslate SobelEdges
    """),
    "keras.src.ops.linalg": _names("""
        Cholesky CholeskyInverse Det Eig Eigh Inv Lstsq LuFactor MatrixRank Norm Pinv Qr SVD Solve
        SolveTriangular
    """),
    "keras.src.ops.math": _names("""
        CDist Erf Erfc Erfinv ExtractSequences FFT FFT2 IFFT2 IRFFT ISTFT InTopK Logdet Logsumexp
        RFFT Rsqrt STFT SegmentMax SegmentMin SegmentProd SegmentSum TopK ViewAsComplex ViewAsReal
    """),
    "keras.src.ops.nn": _names("""
        AdaptiveAveragePool AdaptiveMaxPool AveragePool BatchNorm BinaryCrossentropy CTCDecode
        CTCLoss CategoricalCrossentropy Celu Conv ConvTranspose DepthToSpace DepthwiseConv
        DotProductAttention Elu Fold Gelu Glu HardShrink HardSigmoid HardSilu HardTanh LayerNorm
        LeakyRelu LogSigmoid LogSoftmax MaxPool Moments MultiHot Normalize OneHot PSNR Polar
        RMSNorm Relu Relu6 Selu SeparableConv Sigmoid Silu SoftShrink Softmax Softplus Softsign
        SpaceToDepth SparseCategoricalCrossentropy SparsePlus SparseSigmoid Sparsemax Squareplus
        TanhShrink Threshold Unfold
    """),
    "keras.src.ops.numpy": _names("""
        Abs Absolute Add All AllClose Amax Amin Angle Any Append Arange Arccos Arccosh Arcsin
        Arcsinh Arctan Arctan2 Arctanh Argmax Argmin Argpartition Argsort Array ArraySplit Average
        Bincount BitwiseAnd BitwiseInvert BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift
        BitwiseXor BroadcastTo Cbrt Ceil Clip Concatenate Conj Conjugate Copy Corrcoef Correlate
        Cos Cosh CountNonzero Cross Cumprod Cumsum Deg2rad Diag Diagflat Diagonal Diff Digitize
        Divide DivideNoNan Dot Dsplit Dstack Einsum EmptyLike Equal Exp Exp2 ExpandDims Expm1 Fabs
        Flip Fliplr Flipud Floor FloorDivide Fmax Fmin Fmod Full FullLike Gcd Geomspace GetItem
        Greater GreaterEqual Heaviside Histogram Hsplit Hstack Hypot I0 Imag Inner IsIn Isclose
        Isfinite Isinf Isnan Isneginf Isposinf Isreal Kron Lcm Ldexp LeftShift Less LessEqual
        Linspace Log Log10 Log1p Log2 Logaddexp Logaddexp2 LogicalAnd LogicalNot LogicalOr
        LogicalXor Logspace Matmul Max Maximum Mean Median Meshgrid Min Minimum Mod Moveaxis
        Multiply NanToNum Nanargmax Nanargmin Nancumprod Nancumsum Nanmax Nanmean Nanmedian Nanmin
        Nanpercentile Nanprod Nanquantile Nanstd Nansum Nanvar Ndim Negative Nextafter Nonzero
        NotEqual OnesLike Outer Pad Percentile Power Prod Ptp Quantile Rad2deg Ravel Real
        Reciprocal Repeat Reshape RightShift Roll Rot90 Round SearchSorted Select Sign Signbit Sin
        Sinc Sinh Size Slogdet Sort Split Sqrt Square Squeeze Stack Std Subtract Sum Swapaxes Take
        TakeAlongAxis Tan Tanh Tensordot Tile Trace Transpose Trapezoid Tril Triu TrueDivide Trunc
        Unique UnravelIndex Vander Var Vdot View Vsplit Vstack Where ZerosLike
    """),
}
"""Operations on tensors, which are called on symbolic ones in a functional model."""
