module {
  func.func @main(%arg0: tensor<32x16xbf16>, %arg1: tensor<32x16xbf16>, %arg2: tensor<8x16xbf16>, %arg3: tensor<16xbf16>, %arg4: tensor<16xbf16>, %arg5: tensor<16xbf16>, %arg6: tensor<16xbf16>, %arg7: tensor<16x16xbf16>, %arg8: tensor<16x16xbf16>, %arg9: tensor<16x16xbf16>, %arg10: tensor<16x16xbf16>, %arg11: tensor<16xbf16>, %arg12: tensor<16xbf16>, %arg13: tensor<64x16xbf16>, %arg14: tensor<64xbf16>, %arg15: tensor<16x64xbf16>, %arg16: tensor<16xbf16>, %arg17: tensor<2x8xi64>, %arg18: tensor<2x8xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<16xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<16xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<8x8xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<8xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<8xi64>
    %c_4 = stablehlo.constant dense<8> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<-6.553600e+04> : tensor<bf16>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<8x8xf32>
    %cst_9 = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %cst_10 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_11 = stablehlo.constant dense<1.000000e+00> : tensor<2x8x64xbf16>
    %cst_12 = stablehlo.constant dense<2.000000e+00> : tensor<2x8x64xbf16>
    %cst_13 = stablehlo.constant dense<5.000000e-01> : tensor<2x8x64xbf16>
    %cst_14 = stablehlo.constant dense<-4.000000e+00> : tensor<2x8x64xf32>
    %cst_15 = stablehlo.constant dense<4.000000e+00> : tensor<2x8x64xf32>
    %cst_16 = stablehlo.constant dense<-2.72614237E-10> : tensor<2x8x64xf32>
    %cst_17 = stablehlo.constant dense<2.77068146E-8> : tensor<2x8x64xf32>
    %cst_18 = stablehlo.constant dense<-2.10102394E-6> : tensor<2x8x64xf32>
    %cst_19 = stablehlo.constant dense<-5.69250624E-5> : tensor<2x8x64xf32>
    %cst_20 = stablehlo.constant dense<-7.34990637E-4> : tensor<2x8x64xf32>
    %cst_21 = stablehlo.constant dense<-2.954600e-03> : tensor<2x8x64xf32>
    %cst_22 = stablehlo.constant dense<-0.0160960332> : tensor<2x8x64xf32>
    %cst_23 = stablehlo.constant dense<-1.45660715E-5> : tensor<2x8x64xf32>
    %cst_24 = stablehlo.constant dense<-2.13374049E-4> : tensor<2x8x64xf32>
    %cst_25 = stablehlo.constant dense<-0.00168282702> : tensor<2x8x64xf32>
    %cst_26 = stablehlo.constant dense<-0.00737332925> : tensor<2x8x64xf32>
    %cst_27 = stablehlo.constant dense<-0.0142647391> : tensor<2x8x64xf32>
    %cst_28 = stablehlo.constant dense<-1.000000e+00> : tensor<2x8x64xf32>
    %cst_29 = stablehlo.constant dense<1.000000e+00> : tensor<2x8x64xf32>
    %cst_30 = arith.constant dense<1> : tensor<1xi64>
    %cst_31 = arith.constant dense<16> : tensor<1xi64>
    %cst_32 = arith.constant dense<1.000000e-05> : tensor<1xf64>
    %cst_33 = arith.constant dense<2.8284271247461903> : tensor<1xf64>
    %0 = "stablehlo.gather"(%arg0, %arg17) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<32x16xbf16>, tensor<2x8xi64>) -> tensor<2x8x16xbf16>
    %1 = stablehlo.convert %0 : tensor<2x8x16xbf16>
    %2 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %3 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %4 = stablehlo.divide %3, %2 : tensor<f64>
    %5 = stablehlo.ceil %4 : tensor<f64>
    %6 = stablehlo.convert %5 : (tensor<f64>) -> tensor<i64>
    %7 = stablehlo.reshape %6 : (tensor<i64>) -> tensor<1xi64>
    %8 = stablehlo.dynamic_iota %7, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
    %9 = stablehlo.multiply %8, %c_3 : tensor<8xi64>
    %10 = stablehlo.add %9, %c_2 : tensor<8xi64>
    %11 = "stablehlo.gather"(%arg2, %10) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<8x16xbf16>, tensor<8xi64>) -> tensor<8x16xbf16>
    %12 = stablehlo.convert %11 : tensor<8x16xbf16>
    %13 = stablehlo.broadcast_in_dim %12, dims = [1, 2] : (tensor<8x16xbf16>) -> tensor<2x8x16xbf16>
    %14 = stablehlo.add %1, %13 : tensor<2x8x16xbf16>
    %15 = stablehlo.convert %14 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf32>
    %16 = stablehlo.convert %15 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %17 = stablehlo.reduce(%16 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %18 = stablehlo.reshape %17 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %19 = stablehlo.convert %cst_31 : (tensor<1xi64>) -> tensor<1xf64>
    %20 = stablehlo.reshape %19 : (tensor<1xf64>) -> tensor<f64>
    %21 = stablehlo.broadcast_in_dim %20, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %22 = stablehlo.divide %18, %21 : tensor<2x8x1xf64>
    %23 = stablehlo.broadcast_in_dim %22, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %24 = stablehlo.subtract %16, %23 : tensor<2x8x16xf64>
    %25 = stablehlo.multiply %24, %24 : tensor<2x8x16xf64>
    %26 = stablehlo.reduce(%25 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %27 = stablehlo.reshape %26 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %28 = stablehlo.divide %27, %21 : tensor<2x8x1xf64>
    %29 = stablehlo.convert %28 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %30 = stablehlo.reduce(%15 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %31 = stablehlo.reshape %30 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %32 = stablehlo.convert %cst_31 : (tensor<1xi64>) -> tensor<1xf32>
    %33 = stablehlo.reshape %32 : (tensor<1xf32>) -> tensor<f32>
    %34 = stablehlo.broadcast_in_dim %33, dims = [] : (tensor<f32>) -> tensor<2x8x1xf32>
    %35 = stablehlo.divide %31, %34 : tensor<2x8x1xf32>
    %36 = stablehlo.convert %cst_32 : (tensor<1xf64>) -> tensor<1xf32>
    %37 = stablehlo.reshape %36 : (tensor<1xf32>) -> tensor<f32>
    %38 = stablehlo.broadcast_in_dim %37, dims = [] : (tensor<f32>) -> tensor<2x8x1xf32>
    %39 = stablehlo.add %29, %38 : tensor<2x8x1xf32>
    %40 = stablehlo.rsqrt %39 : tensor<2x8x1xf32>
    %41 = stablehlo.broadcast_in_dim %35, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %42 = stablehlo.subtract %15, %41 : tensor<2x8x16xf32>
    %43 = stablehlo.broadcast_in_dim %40, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %44 = stablehlo.multiply %42, %43 : tensor<2x8x16xf32>
    %45 = stablehlo.convert %arg5 : (tensor<16xbf16>) -> tensor<16xf32>
    %46 = stablehlo.broadcast_in_dim %45, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %47 = stablehlo.multiply %44, %46 : tensor<2x8x16xf32>
    %48 = stablehlo.convert %arg6 : (tensor<16xbf16>) -> tensor<16xf32>
    %49 = stablehlo.broadcast_in_dim %48, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %50 = stablehlo.add %47, %49 : tensor<2x8x16xf32>
    %51 = stablehlo.convert %50 : (tensor<2x8x16xf32>) -> tensor<2x8x16xbf16>
    %52 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %53 = stablehlo.reshape %51 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %54 = stablehlo.dot_general %53, %52, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %55 = stablehlo.reshape %54 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %56 = stablehlo.reshape %55 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %57 = stablehlo.transpose %arg8, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %58 = stablehlo.dot_general %53, %57, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %59 = stablehlo.reshape %58 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %60 = stablehlo.reshape %59 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %61 = stablehlo.transpose %arg9, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %62 = stablehlo.dot_general %53, %61, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %63 = stablehlo.reshape %62 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %64 = stablehlo.reshape %63 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %65 = stablehlo.transpose %56, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %66 = stablehlo.transpose %60, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %67 = stablehlo.transpose %64, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %68 = stablehlo.transpose %66, dims = [0, 1, 3, 2] : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %69 = stablehlo.reshape %65 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %70 = stablehlo.reshape %68 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %71 = stablehlo.broadcast_in_dim %70, dims = [0, 1, 2] : (tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %72 = stablehlo.dot_general %69, %71, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xbf16>, tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %73 = stablehlo.reshape %72 : (tensor<4x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %74 = stablehlo.convert %cst_33 : (tensor<1xf64>) -> tensor<1xbf16>
    %75 = stablehlo.reshape %74 : (tensor<1xbf16>) -> tensor<bf16>
    %76 = stablehlo.broadcast_in_dim %75, dims = [] : (tensor<bf16>) -> tensor<2x2x8x8xbf16>
    %77 = stablehlo.divide %73, %76 : tensor<2x2x8x8xbf16>
    %78 = stablehlo.reshape %10 : (tensor<8xi64>) -> tensor<1x8xi64>
    %79 = stablehlo.reshape %10 : (tensor<8xi64>) -> tensor<8x1xi64>
    %80 = stablehlo.broadcast_in_dim %78, dims = [0, 1] : (tensor<1x8xi64>) -> tensor<8x8xi64>
    %81 = stablehlo.broadcast_in_dim %79, dims = [0, 1] : (tensor<8x1xi64>) -> tensor<8x8xi64>
    %82 = stablehlo.subtract %80, %81 : tensor<8x8xi64>
    %83 = stablehlo.compare LE, %82, %c_1, SIGNED : (tensor<8x8xi64>, tensor<8x8xi64>) -> tensor<8x8xi1>
    %84 = stablehlo.broadcast_in_dim %83, dims = [0, 1] : (tensor<8x8xi1>) -> tensor<8x8xi1>
    %85 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %86 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %87 = stablehlo.select %84, %85, %86 : tensor<8x8xi1>, tensor<8x8xf32>
    %88 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %89 = stablehlo.broadcast_in_dim %88, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %90 = stablehlo.compare EQ, %87, %89, FLOAT : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xi1>
    %91 = stablehlo.reshape %90 : (tensor<8x8xi1>) -> tensor<1x1x8x8xi1>
    %92 = stablehlo.broadcast_in_dim %91, dims = [0, 1, 2, 3] : (tensor<1x1x8x8xi1>) -> tensor<2x2x8x8xi1>
    %93 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<bf16>) -> tensor<2x2x8x8xbf16>
    %94 = stablehlo.broadcast_in_dim %77, dims = [0, 1, 2, 3] : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %95 = stablehlo.select %92, %93, %94 : tensor<2x2x8x8xi1>, tensor<2x2x8x8xbf16>
    %96 = stablehlo.convert %95 : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xf32>
    %97 = stablehlo.reduce(%96 init: %cst_10) applies stablehlo.maximum across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %98 = stablehlo.reshape %97 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %99 = stablehlo.broadcast_in_dim %98, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %100 = stablehlo.subtract %96, %99 : tensor<2x2x8x8xf32>
    %101 = stablehlo.exponential %100 : tensor<2x2x8x8xf32>
    %102 = stablehlo.reduce(%101 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %103 = stablehlo.reshape %102 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %104 = stablehlo.broadcast_in_dim %103, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %105 = stablehlo.divide %101, %104 : tensor<2x2x8x8xf32>
    %106 = stablehlo.convert %105 : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xbf16>
    %107 = stablehlo.reshape %106 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %108 = stablehlo.reshape %67 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %109 = stablehlo.broadcast_in_dim %108, dims = [0, 1, 2] : (tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %110 = stablehlo.dot_general %107, %109, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xbf16>, tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %111 = stablehlo.reshape %110 : (tensor<4x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %112 = stablehlo.transpose %111, dims = [0, 2, 1, 3] : (tensor<2x2x8x8xbf16>) -> tensor<2x8x2x8xbf16>
    %113 = stablehlo.reshape %112 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x16xbf16>
    %114 = stablehlo.transpose %arg10, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %115 = stablehlo.reshape %113 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %116 = stablehlo.dot_general %115, %114, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %117 = stablehlo.reshape %116 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %118 = stablehlo.add %14, %117 : tensor<2x8x16xbf16>
    %119 = stablehlo.convert %118 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf32>
    %120 = stablehlo.convert %119 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %121 = stablehlo.reduce(%120 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %122 = stablehlo.reshape %121 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %123 = stablehlo.divide %122, %21 : tensor<2x8x1xf64>
    %124 = stablehlo.broadcast_in_dim %123, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %125 = stablehlo.subtract %120, %124 : tensor<2x8x16xf64>
    %126 = stablehlo.multiply %125, %125 : tensor<2x8x16xf64>
    %127 = stablehlo.reduce(%126 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %128 = stablehlo.reshape %127 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %129 = stablehlo.divide %128, %21 : tensor<2x8x1xf64>
    %130 = stablehlo.convert %129 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %131 = stablehlo.reduce(%119 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %132 = stablehlo.reshape %131 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %133 = stablehlo.divide %132, %34 : tensor<2x8x1xf32>
    %134 = stablehlo.add %130, %38 : tensor<2x8x1xf32>
    %135 = stablehlo.rsqrt %134 : tensor<2x8x1xf32>
    %136 = stablehlo.broadcast_in_dim %133, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %137 = stablehlo.subtract %119, %136 : tensor<2x8x16xf32>
    %138 = stablehlo.broadcast_in_dim %135, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %139 = stablehlo.multiply %137, %138 : tensor<2x8x16xf32>
    %140 = stablehlo.convert %arg11 : (tensor<16xbf16>) -> tensor<16xf32>
    %141 = stablehlo.broadcast_in_dim %140, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %142 = stablehlo.multiply %139, %141 : tensor<2x8x16xf32>
    %143 = stablehlo.convert %arg12 : (tensor<16xbf16>) -> tensor<16xf32>
    %144 = stablehlo.broadcast_in_dim %143, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %145 = stablehlo.add %142, %144 : tensor<2x8x16xf32>
    %146 = stablehlo.convert %145 : (tensor<2x8x16xf32>) -> tensor<2x8x16xbf16>
    %147 = stablehlo.reshape %146 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %148 = stablehlo.transpose %arg13, dims = [1, 0] : (tensor<64x16xbf16>) -> tensor<16x64xbf16>
    %149 = stablehlo.convert %arg14 : (tensor<64xbf16>) -> tensor<64xf32>
    %150 = stablehlo.convert %147 : (tensor<16x16xbf16>) -> tensor<16x16xf32>
    %151 = stablehlo.convert %148 : (tensor<16x64xbf16>) -> tensor<16x64xf32>
    %152 = stablehlo.dot_general %150, %151, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x64xf32>) -> tensor<16x64xf32>
    %153 = stablehlo.convert %cst_30 : (tensor<1xi64>) -> tensor<1xf32>
    %154 = stablehlo.reshape %153 : (tensor<1xf32>) -> tensor<f32>
    %155 = stablehlo.broadcast_in_dim %154, dims = [] : (tensor<f32>) -> tensor<16x64xf32>
    %156 = stablehlo.multiply %152, %155 : tensor<16x64xf32>
    %157 = stablehlo.broadcast_in_dim %154, dims = [] : (tensor<f32>) -> tensor<64xf32>
    %158 = stablehlo.multiply %149, %157 : tensor<64xf32>
    %159 = stablehlo.broadcast_in_dim %158, dims = [1] : (tensor<64xf32>) -> tensor<16x64xf32>
    %160 = stablehlo.add %156, %159 : tensor<16x64xf32>
    %161 = stablehlo.convert %160 : (tensor<16x64xf32>) -> tensor<16x64xbf16>
    %162 = stablehlo.reshape %161 : (tensor<16x64xbf16>) -> tensor<2x8x64xbf16>
    %163 = stablehlo.multiply %162, %cst_13 : tensor<2x8x64xbf16>
    %164 = stablehlo.rsqrt %cst_12 : tensor<2x8x64xbf16>
    %165 = stablehlo.multiply %162, %164 : tensor<2x8x64xbf16>
    %166 = stablehlo.convert %165 : (tensor<2x8x64xbf16>) -> tensor<2x8x64xf32>
    %167 = stablehlo.clamp %cst_14, %166, %cst_15 : tensor<2x8x64xf32>
    %168 = stablehlo.multiply %167, %167 : tensor<2x8x64xf32>
    %169 = stablehlo.multiply %cst_16, %168 : tensor<2x8x64xf32>
    %170 = stablehlo.add %169, %cst_17 : tensor<2x8x64xf32>
    %171 = stablehlo.multiply %170, %168 : tensor<2x8x64xf32>
    %172 = stablehlo.add %171, %cst_18 : tensor<2x8x64xf32>
    %173 = stablehlo.multiply %172, %168 : tensor<2x8x64xf32>
    %174 = stablehlo.add %173, %cst_19 : tensor<2x8x64xf32>
    %175 = stablehlo.multiply %174, %168 : tensor<2x8x64xf32>
    %176 = stablehlo.add %175, %cst_20 : tensor<2x8x64xf32>
    %177 = stablehlo.multiply %176, %168 : tensor<2x8x64xf32>
    %178 = stablehlo.add %177, %cst_21 : tensor<2x8x64xf32>
    %179 = stablehlo.multiply %178, %168 : tensor<2x8x64xf32>
    %180 = stablehlo.add %179, %cst_22 : tensor<2x8x64xf32>
    %181 = stablehlo.multiply %cst_23, %168 : tensor<2x8x64xf32>
    %182 = stablehlo.add %181, %cst_24 : tensor<2x8x64xf32>
    %183 = stablehlo.multiply %182, %168 : tensor<2x8x64xf32>
    %184 = stablehlo.add %183, %cst_25 : tensor<2x8x64xf32>
    %185 = stablehlo.multiply %184, %168 : tensor<2x8x64xf32>
    %186 = stablehlo.add %185, %cst_26 : tensor<2x8x64xf32>
    %187 = stablehlo.multiply %186, %168 : tensor<2x8x64xf32>
    %188 = stablehlo.add %187, %cst_27 : tensor<2x8x64xf32>
    %189 = stablehlo.multiply %167, %180 : tensor<2x8x64xf32>
    %190 = stablehlo.divide %189, %188 : tensor<2x8x64xf32>
    %191 = stablehlo.clamp %cst_28, %190, %cst_29 : tensor<2x8x64xf32>
    %192 = stablehlo.convert %191 : (tensor<2x8x64xf32>) -> tensor<2x8x64xbf16>
    %193 = stablehlo.add %192, %cst_11 : tensor<2x8x64xbf16>
    %194 = stablehlo.multiply %193, %163 : tensor<2x8x64xbf16>
    %195 = stablehlo.reshape %194 : (tensor<2x8x64xbf16>) -> tensor<16x64xbf16>
    %196 = stablehlo.transpose %arg15, dims = [1, 0] : (tensor<16x64xbf16>) -> tensor<64x16xbf16>
    %197 = stablehlo.convert %arg16 : (tensor<16xbf16>) -> tensor<16xf32>
    %198 = stablehlo.convert %195 : (tensor<16x64xbf16>) -> tensor<16x64xf32>
    %199 = stablehlo.convert %196 : (tensor<64x16xbf16>) -> tensor<64x16xf32>
    %200 = stablehlo.dot_general %198, %199, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x16xf32>) -> tensor<16x16xf32>
    %201 = stablehlo.broadcast_in_dim %154, dims = [] : (tensor<f32>) -> tensor<16x16xf32>
    %202 = stablehlo.multiply %200, %201 : tensor<16x16xf32>
    %203 = stablehlo.broadcast_in_dim %154, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %204 = stablehlo.multiply %197, %203 : tensor<16xf32>
    %205 = stablehlo.broadcast_in_dim %204, dims = [1] : (tensor<16xf32>) -> tensor<16x16xf32>
    %206 = stablehlo.add %202, %205 : tensor<16x16xf32>
    %207 = stablehlo.convert %206 : (tensor<16x16xf32>) -> tensor<16x16xbf16>
    %208 = stablehlo.reshape %207 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %209 = stablehlo.add %118, %208 : tensor<2x8x16xbf16>
    %210 = stablehlo.convert %209 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf32>
    %211 = stablehlo.convert %210 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %212 = stablehlo.reduce(%211 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %213 = stablehlo.reshape %212 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %214 = stablehlo.divide %213, %21 : tensor<2x8x1xf64>
    %215 = stablehlo.broadcast_in_dim %214, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %216 = stablehlo.subtract %211, %215 : tensor<2x8x16xf64>
    %217 = stablehlo.multiply %216, %216 : tensor<2x8x16xf64>
    %218 = stablehlo.reduce(%217 init: %cst_9) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %219 = stablehlo.reshape %218 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %220 = stablehlo.divide %219, %21 : tensor<2x8x1xf64>
    %221 = stablehlo.convert %220 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %222 = stablehlo.reduce(%210 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %223 = stablehlo.reshape %222 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %224 = stablehlo.divide %223, %34 : tensor<2x8x1xf32>
    %225 = stablehlo.add %221, %38 : tensor<2x8x1xf32>
    %226 = stablehlo.rsqrt %225 : tensor<2x8x1xf32>
    %227 = stablehlo.broadcast_in_dim %224, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %228 = stablehlo.subtract %210, %227 : tensor<2x8x16xf32>
    %229 = stablehlo.broadcast_in_dim %226, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %230 = stablehlo.multiply %228, %229 : tensor<2x8x16xf32>
    %231 = stablehlo.convert %arg3 : (tensor<16xbf16>) -> tensor<16xf32>
    %232 = stablehlo.broadcast_in_dim %231, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %233 = stablehlo.multiply %230, %232 : tensor<2x8x16xf32>
    %234 = stablehlo.convert %arg4 : (tensor<16xbf16>) -> tensor<16xf32>
    %235 = stablehlo.broadcast_in_dim %234, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %236 = stablehlo.add %233, %235 : tensor<2x8x16xf32>
    %237 = stablehlo.convert %236 : (tensor<2x8x16xf32>) -> tensor<2x8x16xbf16>
    %238 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<32x16xbf16>) -> tensor<16x32xbf16>
    %239 = stablehlo.reshape %237 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %240 = stablehlo.dot_general %239, %238, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x32xbf16>) -> tensor<16x32xbf16>
    %241 = stablehlo.reshape %240 : (tensor<16x32xbf16>) -> tensor<2x8x32xbf16>
    %242 = stablehlo.reshape %241 : (tensor<2x8x32xbf16>) -> tensor<16x32xbf16>
    %243 = stablehlo.convert %242 : (tensor<16x32xbf16>) -> tensor<16x32xf32>
    %244 = stablehlo.reshape %arg18 : (tensor<2x8xi64>) -> tensor<16xi64>
    %245 = stablehlo.reduce(%243 init: %cst_10) applies stablehlo.maximum across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %246 = stablehlo.reshape %245 : (tensor<16xf32>) -> tensor<16x1xf32>
    %247 = stablehlo.broadcast_in_dim %246, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %248 = stablehlo.subtract %243, %247 : tensor<16x32xf32>
    %249 = stablehlo.exponential %248 : tensor<16x32xf32>
    %250 = stablehlo.reduce(%249 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %251 = stablehlo.reshape %250 : (tensor<16xf32>) -> tensor<16x1xf32>
    %252 = stablehlo.log %251 : tensor<16x1xf32>
    %253 = stablehlo.broadcast_in_dim %252, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %254 = stablehlo.subtract %248, %253 : tensor<16x32xf32>
    %255 = stablehlo.compare NE, %244, %c_0, SIGNED : (tensor<16xi64>, tensor<16xi64>) -> tensor<16xi1>
    %256 = stablehlo.broadcast_in_dim %255, dims = [0] : (tensor<16xi1>) -> tensor<16xi1>
    %257 = stablehlo.broadcast_in_dim %244, dims = [0] : (tensor<16xi64>) -> tensor<16xi64>
    %258 = stablehlo.select %256, %257, %c : tensor<16xi1>, tensor<16xi64>
    %259 = stablehlo.reshape %258 : (tensor<16xi64>) -> tensor<16x1xi64>
    %260 = stablehlo.iota dim = 0 : tensor<16x1x1xi64>
    %261 = stablehlo.reshape %259 : (tensor<16x1xi64>) -> tensor<16x1x1xi64>
    %262 = stablehlo.concatenate %260, %261, dim = 2 : (tensor<16x1x1xi64>, tensor<16x1x1xi64>) -> tensor<16x1x2xi64>
    %263 = "stablehlo.gather"(%254, %262) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<16x32xf32>, tensor<16x1x2xi64>) -> tensor<16x1xf32>
    %264 = stablehlo.reshape %263 : (tensor<16x1xf32>) -> tensor<16xf32>
    %265 = stablehlo.negate %264 : tensor<16xf32>
    %266 = stablehlo.broadcast_in_dim %265, dims = [0] : (tensor<16xf32>) -> tensor<16xf32>
    %267 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %268 = stablehlo.select %256, %266, %267 : tensor<16xi1>, tensor<16xf32>
    %269 = stablehlo.convert %255 : (tensor<16xi1>) -> tensor<16xi64>
    %270 = stablehlo.reduce(%269 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<16xi64>, tensor<i64>) -> tensor<i64>
    %271 = stablehlo.convert %270 : (tensor<i64>) -> tensor<f32>
    %272 = stablehlo.reduce(%268 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %273 = stablehlo.divide %272, %271 : tensor<f32>
    return %273 : tensor<f32>
  }
}

